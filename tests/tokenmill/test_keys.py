"""Shard keys: what changes a result changes the key, and what only changes speed does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copy_tokenizer, make_headed
from hypothesis import given
from hypothesis import strategies as st
from outputs import MINILM, jsonl, write_files
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tokenmill.job import Job
from tokenmill.keys import fingerprint
from tokenmill.model_files import resolve_model
from tokenmill.plan import Plan, make_plan
from tokenmill.settle import prepare
from tokenmill.store import StorageConfig
from tokenmill.testing import make_job

TOKENS = {
    "input.format": "csv",
    "input.text": "body",
    "input.id": "id",
    "input.keep": ["lang"],
    "input.template": "{text}!",
    "input.pair": "body",
    "input.csv.delimiter": ";",
    "input.csv.quote": "'",
    "input.csv.escape": "\\",
    "input.csv.columns": ["text"],
    "input.unicode": "NFC",
    "input.rows": "files",
    "input.nulls": "empty",
    "input.encoding": "latin-1",
    "input.undecodable": "replace",
    "input.max_row_bytes": 2048,
    "input.shard_bytes": 1,
    "tokenizer.max_tokens": 100,
    "tokenizer.overflow": "reject",
    "tokenizer.truncation_side": "left",
    "tokenizer.special_tokens_in_text": "parse",
    "tokenizer.prompt": "query: ",
}
RESULTS = {
    "inference.precision": "bf16",
    "inference.pooling": "cls",
    "inference.normalize": False,
    "inference.dimensions": 128,
    "inference.dtype": "float16",
}
NOTHING = {
    "name": "another-name",
    "inference.device": "cpu",
    "inference.trust_remote_code": True,
    "output.target_part_bytes": 5,
    "aggregate.group_by": [],
    "quality.max_reject_rate": 0.5,
    "quality.max_unknown_rate": 0.5,
    "quality.max_truncated_rate": 0.5,
    "quality.max_blank_rate": 0.5,
    "quality.max_replaced_rate": 0.5,
    "quality.max_removed_rate": 0.5,
    "run.workers": 7,
    "run.on": "pool",
    "run.max_batch_tokens": 99,
    "run.window_rows": 3,
    "run.threads": 1,
    "run.gates": False,
    "run.overlap": True,
}
GENERATE = {
    "max_new_tokens": 5,
    "temperature": 0.5,
    "stop": ["."],
    "stop_ids": [9],
    "top_p": 0.5,
    "top_k": 3,
    "seed": 1,
    "num_outputs": 2,
}
STORAGE = {"endpoint_url": "http://x", "region": "r", "anon": True}
# Tested one by one below, or with one value only.
ELSEWHERE = {
    "input.uri",
    "output.uri",
    "tokenizer.name",
    "tokenizer.block",
    "tokenizer.prompt_name",
    "inference.model",
    "inference.block",
    "input.storage.block",
    "output.storage.block",
    *(f"input.storage.{name}" for name in STORAGE),
    *(f"output.storage.{name}" for name in STORAGE),
    "inference.task",
    "inference.min_agreement",
    "inference.all_scores",
    "inference.threshold",
    "inference.activation",
    "inference.pool_chunks",
    *(f"inference.{name}" for name in GENERATE),
    "tokenizer.stride",
    "input.messages",
    "tokenizer.add_generation_prompt",
}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def changed(job: Job, path: str, value: Any, **beside: Any) -> Job:
    """beside: other values of the same section."""
    data = job.model_dump(mode="json")
    *sections, name = path.split(".")
    place = data
    for section in sections:
        place = place[section]
    place.update({name: value, **beside})
    return Job.parse(data)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    rows = [{"text": f"row {n}", "body": "b", "id": n, "lang": "en"} for n in range(3)]
    write_files(tmp_path, {"a.jsonl": jsonl(rows), "b.jsonl": jsonl(rows)})
    return make_job(tmp_path, inference={"model": MINILM})


def plan_of(job: Job) -> Plan:
    return make_plan(prepare(job), StorageConfig())


def test_every_setting_is_either_in_the_keys_or_not() -> None:
    assert set(leaves(Job)) == {*TOKENS, *RESULTS, *NOTHING, *ELSEWHERE}


def test_equal_jobs_have_equal_keys(job: Job) -> None:
    assert plan_of(job) == plan_of(job)


@pytest.mark.parametrize(("path", "value"), TOKENS.items())
def test_what_changes_tokens_changes_both_keys(job: Job, path: str, value: Any) -> None:
    if path == "input.format":  # files that are JSONL and CSV at once
        write_files(Path(str(job.input.uri)).parent, {"a.jsonl": "text\na", "b.jsonl": "text\nb"})
    before, after = plan_of(job), plan_of(changed(job, path, value))
    assert set(before.keys_of("tokenize")).isdisjoint(after.keys_of("tokenize"))
    assert set(before.keys_of("infer")).isdisjoint(after.keys_of("infer"))


@pytest.mark.parametrize(("path", "value"), RESULTS.items())
def test_what_changes_results_changes_their_key_and_keeps_the_tokens(job: Job, path: str, value: Any) -> None:
    before, after = plan_of(job), plan_of(changed(job, path, value))
    assert before.keys_of("tokenize") == after.keys_of("tokenize")
    assert set(before.keys_of("infer")).isdisjoint(after.keys_of("infer"))


@pytest.mark.parametrize(("path", "value"), NOTHING.items())
def test_what_changes_only_speed_or_limits_changes_no_key(job: Job, path: str, value: Any) -> None:
    assert plan_of(job) == plan_of(changed(job, path, value))


def test_the_least_agreement_of_int8_changes_no_key(job: Job) -> None:
    plans = [
        plan_of(changed(job, "inference.precision", "int8", min_agreement=share)) for share in (0.5, 0.99)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("section", ["input", "output"])
def test_how_a_bucket_is_opened_changes_no_key(job: Job, section: str) -> None:
    before, part = plan_of(job), getattr(job, section)
    for name, value in STORAGE.items():
        # Without validation: a job refuses them for the local files of this test.
        storage = part.storage.model_copy(update={name: value})
        update = {section: part.model_copy(update={"storage": storage})}
        assert plan_of(job.model_copy(update=update)) == before


CLASSIFIER = {"id2label": {0: "a", 1: "b"}, "problem_type": "multi_label_classification"}


def test_options_of_classify_are_in_its_keys_and_in_no_other(tmp_path: Path, job: Job) -> None:
    model = make_headed(tmp_path / "model", "bert", AutoModelForSequenceClassification, **CLASSIFIER)
    copy_tokenizer(model)
    job = changed(changed(job, "inference.model", str(model)), "tokenizer.max_tokens", 40)
    found = [plan_of(job)]
    job = changed(job, "inference.task", "classify")
    for path, value in {"all_scores": True, "threshold": 0.25, "activation": "none"}.items():
        found += [plan_of(job), plan_of(changed(job, f"inference.{path}", value))]
    assert len({tuple(plan.keys_of("infer")) for plan in found}) == 5
    assert len({tuple(plan.keys_of("tokenize")) for plan in found}) == 1


def test_options_of_generate_are_in_its_keys(tmp_path: Path, job: Job) -> None:
    model = make_headed(tmp_path / "model", "llama", AutoModelForCausalLM)
    copy_tokenizer(model)
    job = changed(changed(job, "inference.model", str(model)), "tokenizer.max_tokens", 40)
    job = changed(changed(job, "inference.max_new_tokens", 9, task="generate"), "inference.temperature", 1.0)
    found = [job, *(changed(job, f"inference.{name}", value) for name, value in GENERATE.items())]
    plans = [plan_of(job) for job in found]
    assert len({tuple(plan.keys_of("infer")) for plan in plans}) == len(found)
    assert len({tuple(plan.keys_of("tokenize")) for plan in plans}) == 1


def test_options_of_chunks_are_in_the_keys(tmp_path: Path, job: Job) -> None:
    model = make_headed(tmp_path / "model", "bert", AutoModelForSequenceClassification)
    copy_tokenizer(model)
    job = changed(changed(job, "inference.model", str(model)), "tokenizer.max_tokens", 40)
    job = changed(changed(job, "inference.task", "classify"), "tokenizer.overflow", "chunk")
    strides = {tuple(plan_of(changed(job, "tokenizer.stride", n)).keys_of("tokenize")) for n in (None, 0, 3)}
    assert len(strides) == 2
    other = plan_of(changed(job, "inference.pool_chunks", "max"))
    assert plan_of(job).keys_of("tokenize") == other.keys_of("tokenize")
    assert set(plan_of(job).keys_of("infer")).isdisjoint(other.keys_of("infer"))


def test_another_model_changes_results_even_under_the_same_name(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model(MINILM), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").write_bytes(b"one")
    job = changed(job, "inference.model", str(folder))
    before = plan_of(job)
    assert plan_of(job) == before
    (folder / "model.safetensors").write_bytes(b"two")
    after = plan_of(job)
    assert before.keys_of("tokenize") == after.keys_of("tokenize")
    assert set(before.keys_of("infer")).isdisjoint(after.keys_of("infer"))


def test_another_tokenizer_changes_tokens_even_under_the_same_name(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(resolve_model(MINILM), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    job = changed(job, "tokenizer.name", str(folder))
    before = plan_of(job)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_lower_case": False}))
    assert set(before.keys_of("tokenize")).isdisjoint(plan_of(job).keys_of("tokenize"))


def test_a_changed_file_changes_the_keys_of_its_own_shard_only(job: Job) -> None:
    job = changed(job, "input.shard_bytes", 1)
    before = plan_of(job).keys_of("tokenize")
    write_files(Path(str(job.input.uri)).parent, {"b.jsonl": jsonl(["changed"])})
    job = changed(job, "input.keep", [])
    after = plan_of(job).keys_of("tokenize")
    assert before[0] == after[0]
    assert before[1] != after[1]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(plain, plain)
def test_fingerprints_are_equal_if_and_only_if_the_values_are(left: Any, right: Any) -> None:
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    assert (fingerprint(left) == fingerprint(right)) == same


def test_fingerprints_do_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert len(fingerprint(0)) == 32
