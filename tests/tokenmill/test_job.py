"""The job file: every mistake is one line that says where, what and what else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import ConfigError, InputNotFoundError, UnknownKeyError
from tokenmill.job import Job
from tokenmill.testing import make_job

GOOD = """
name: docs-embeddings
input:
  uri: s3://bucket/docs/*.parquet
  text: body
  id: doc_id
  keep: [lang, no, on, y]
tokenizer: {max_tokens: 256, overflow: truncate}
inference: {task: embed, model: some/model, precision: auto, device: auto}
output: {uri: s3://bucket/docs-embeddings/}
quality: {max_reject_rate: 1e-3}
run: {workers: 2, on: here}
"""


def load(tmp_path: Path, text: str | bytes) -> Job:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Job.load(path)


def test_the_job_file_of_the_design_loads(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD)
    assert job.run.on == "here"
    assert job.input.keep == ["lang", "no", "on", "y"]
    assert job.quality.max_reject_rate == 0.001
    assert Job.parse(job.model_dump(mode="json")) == job


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + GOOD.strip().encode()).name == "docs-embeddings"


def test_words_are_words_and_true_is_true(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD.replace("text: body", "text: yes").replace("on: here}", "gates: false}"))
    assert job.input.text == "yes"
    assert job.run.gates is False
    assert load(tmp_path, GOOD.replace("docs-embeddings\n", "2024-01-01\n", 1)).name == "2024-01-01"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  text: body", "  txet: body", r"unknown key 'input\.txet'; did you mean 'text'\?"),
        ("run:", "rum:", r"unknown key 'rum'; did you mean 'run'\?"),
        ("workers: 2", "quux: 2", r"unknown key 'run\.quux'; valid keys: workers, on, max_batch_tokens"),
        (
            "  text: body",
            "  storage: {regoin: x}",
            r"unknown key 'input\.storage\.regoin'; did you mean 'region'",
        ),
        ("workers: 2", "wrokers: 2, oon: 1", r"unknown key 'run\.\w+'; .* \(and 1 more\)"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UnknownKeyError, match=r"job\.yaml: " + message):
        load(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: docs-embeddings", "", r"'name' is missing"),
        ("  uri: s3://bucket/docs/*.parquet", "", r"'input\.uri' is missing"),
        ("workers: 2", "workers: two", r"run\.workers: .*integer.*not 'two'"),
        ("workers: 2", "workers: 0", r"run\.workers: .*greater than or equal to 1, not 0"),
        (
            "overflow: truncate",
            "overflow: chop",
            r"tokenizer\.overflow: .*'truncate', 'reject' or 'chunk'.*not 'chop'",
        ),
        ("1e-3", "1.5", r"quality\.max_reject_rate: .*less than or equal to 1, not 1\.5"),
        ("1e-3", ".nan", r"quality\.max_reject_rate"),
        ("device: auto", "device: gpu0", r"inference\.device: .*not 'gpu0'"),
        ("name: docs-embeddings", "name: ../x", r"name: .*not '\.\./x'"),
        ("keep: [lang, no, on, y]", "keep: [id]", r"input.keep: 'id' is a column of tokenmill's own"),
        ("keep: [lang, no, on, y]", "keep: [embedding]", r"'embedding' is a column of tokenmill's own"),
        ("keep: [lang, no, on, y]", "keep: [a, a]", r"input.keep: names a column twice"),
        ("keep: [lang, no, on, y]", "keep: lang", r"input\.keep: .*list.*not 'lang'"),
        ("run:", "aggregate: {group_by: [x]}\nrun:", r"group_by: 'x' must be listed in input\.keep"),
        ("run:", "aggregate: {group_by: [lang, lang]}\nrun:", r"group_by: names a column twice"),
        ("s3://bucket/docs/*.parquet", "''", r"input\.uri: must name a file, folder or glob, not ''"),
        ("s3://bucket/docs/*.parquet", "3", r"input\.uri: .*string.*not 3"),
        ("s3://bucket/docs-embeddings/", "''", r"output\.uri: .*at least 1 character"),
        ("text: body", "encoding: utf-81", r"input\.encoding: must be a text encoding.*not 'utf-81'"),
        ("text: body", "encoding: hex", r"input\.encoding: must be a text encoding"),
        ("text: body", "encoding: utf-16", r"input\.encoding: .*line ends.*not 'utf-16'"),
        ("max_tokens: 256", "prompt: a, prompt_name: b", r"tokenizer: give prompt or prompt_name, not both"),
        ("run: {workers: 2, on: here}", "run: 3", r"run: .*not 3"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_its_limit(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=r"job\.yaml: .*" + message) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b", "a job file is a mapping"),
        ("", "a job file is a mapping"),
        ("just words", "a job file is a mapping"),
        (b"\xff\xfe", "cannot be read as a job file"),
        ("name: a\nname: b", "key 'name' is given twice"),
        ("a: !!python/object/apply:os.system [echo]", "not valid YAML"),
        ("{[1]: 2}", "not valid YAML"),
        ("1: 2", "'name' is missing"),
    ],
)
def test_what_is_no_job_file_says_so(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputNotFoundError, match=r"no\.yaml: no such job file"):
        Job.load(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="cannot be read as a job file"):
        Job.load(tmp_path)


@pytest.mark.parametrize("name", ["num_rows", "centroid", "mean_tokens"])
def test_group_columns_do_not_clash_with_the_figures_of_a_group(tmp_path: Path, name: str) -> None:
    assert make_job(tmp_path, input={"keep": [name]}).input.keep == [name]
    with pytest.raises(ConfigError, match=f"group_by: '{name}' is a column of the groups' own"):
        make_job(tmp_path, input={"keep": [name]}, aggregate={"group_by": [name]})


def test_a_job_cannot_be_changed_in_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_job(tmp_path).run.workers = 3


@pytest.mark.parametrize(
    "changes",
    [
        {"input": {"uri": "https://me:hunter2@host/a.parquet"}},
        {"input": {"uri": ["a.parquet", "https://host/b.parquet?X-Amz-Signature=hunter2"]}},
        {"input": {"uri": "https://hunter2@host/a.parquet"}},
        {"input": {"uri": "https://host/b.parquet?v=1&Secret=hunter2"}},
        {"output": {"uri": "https://me:hunter2@host/out"}},
        {"input": {"uri": "s3://b/a.parquet", "storage": {"endpoint_url": "https://me:hunter2@host"}}},
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must not hold a password or signature") as caught:
        make_job(tmp_path, **changes)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "uri"),
    [
        ("input", "in/a.parquet"),
        ("input", ["https://host/a.parquet", "b.parquet"]),
        ("input", "gs://bucket/a.parquet"),
        ("output", "out"),
        ("output", "az://box/out"),
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [("endpoint_url", "http://x"), ("region", "eu"), ("anon", True), ("block", "bucket")],
)
def test_a_bucket_setting_that_would_have_no_effect_is_an_error(
    section: str, uri: str | list[str], name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}: storage\.{name}: is for s3:// only; remove it, "):
        make_job(tmp_path, **{section: {"uri": uri, "storage": {name: value}}})
    spelled_out = {"block": None, "endpoint_url": None, "region": None, "anon": False}
    make_job(tmp_path, **{section: {"uri": uri, "storage": spelled_out}})


def test_bucket_settings_hold_for_the_buckets_of_a_list(tmp_path: Path) -> None:
    job = make_job(tmp_path, input={"uri": ["a.parquet", "s3://b/c.parquet"], "storage": {"region": "eu"}})
    assert job.input.storage.region == "eu"
