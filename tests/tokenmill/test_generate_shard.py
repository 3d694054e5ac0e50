"""Generation as a task of a job: over fakes, and beside plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_headed, train_tokenizer
from outputs import jsonl, published, write_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenmill.engine import Run, finish, run_job
from tokenmill.errors import ConfigError, ModelMismatchError
from tokenmill.estimate import estimate
from tokenmill.generation import Detokenizer, plan_groups, random_stream, stream_number
from tokenmill.job import Job
from tokenmill.report import PAGE_FILE, rebuild
from tokenmill.testing import FakeGenerator, make_job, make_run, word_id

TEXTS = [f"word{n % 6} " * (1 + n % 5) + f"end{n % 8}" for n in range(20)]


def job_with(folder: Path, texts: list[str] = TEXTS, **overrides: Any) -> Job:
    write_files(folder, {"a.jsonl": jsonl(texts)})
    own = {"task": "generate", "max_new_tokens": 10, **overrides.pop("inference", {})}
    return make_job(folder, quality={"max_reject_rate": 1}, inference=own, **overrides)


def run(job: Job, generator: FakeGenerator | None = None) -> Any:
    return finish(make_run(job), generator or FakeGenerator()).counts


def test_equal_prompts_are_completed_once_and_every_row_has_its_own(tmp_path: Path) -> None:
    generator, job = FakeGenerator(), job_with(tmp_path, [*TEXTS, *TEXTS])
    counts = run(job, generator)
    rows = published(job)
    assert generator.runs == [20]
    assert [row["row_ordinal"] for row in rows] == list(range(40))
    assert [row["text"] for row in rows[:20]] == [row["text"] for row in rows[20:]]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert [row["num_prompt_tokens"] for row in rows] == [row["num_tokens"] for row in rows]
    assert counts.tokens_generated == sum(row["num_output_tokens"] for row in rows)
    assert counts.tokens_through == counts.tokens + counts.tokens_generated


DRAWN = {"temperature": 1.0, "num_outputs": 3}


def test_draws_are_the_rows_own_whatever_the_shards_and_the_budget(tmp_path: Path) -> None:
    first = job_with(tmp_path / "one", inference=DRAWN)
    run(first)
    other = first.model_copy(
        update={
            "output": first.output.model_copy(update={"uri": str(tmp_path / "other")}),
            "input": first.input.model_copy(update={"shard_bytes": 60}),
            "run": first.run.model_copy(update={"max_batch_tokens": 13, "window_rows": 3}),
        }
    )
    run(other)
    assert published(first) == published(other)
    outputs = [tuple(output["text"] for output in row["outputs"]) for row in published(first)]
    assert all(len(texts) == 3 for texts in outputs)
    assert len({text for texts in outputs for text in texts}) > 40


def test_another_seed_draws_anew(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        job = job_with(tmp_path / str(seed), inference={**DRAWN, "seed": seed})
        run(job)
        found.append([row["outputs"] for row in published(job)])
    assert found[0] != found[1]


def test_memory_that_runs_out_loses_nothing_and_changes_no_text(tmp_path: Path) -> None:
    plain, small = job_with(tmp_path / "a"), job_with(tmp_path / "b")
    run(plain)
    counts = run(small, FakeGenerator(default_batch_tokens=400, memory_tokens=60, good_before=4))
    assert [row["text"] for row in published(small)] == [row["text"] for row in published(plain)]
    assert counts.out_of_memory == 3


def test_a_budget_beyond_all_use_is_lowered_in_one_step(tmp_path: Path) -> None:
    job = job_with(tmp_path, [*TEXTS, "long " * 30])
    counts = run(job, FakeGenerator(default_batch_tokens=10**12, memory_tokens=5000, good_before=2))
    assert (counts.rows_out, counts.out_of_memory) == (21, 1)


def test_a_prompt_that_never_fits_is_a_reject(tmp_path: Path) -> None:
    job = job_with(tmp_path, ["a b", "c " * 40, "d"])
    counts = run(job, FakeGenerator(memory_tokens=40))
    assert [row["row_ordinal"] for row in published(job)] == [0, 2]
    assert counts.rejects == {"out_of_memory": 1}


def test_nan_is_made_again_in_fp32_or_is_a_reject(tmp_path: Path) -> None:
    apples, rotten = frozenset({word_id("apple")}), frozenset({word_id("rotten")})
    job = job_with(tmp_path, ["good", "bad apple", "rotten apple", "bad apple"])
    counts = run(job, FakeGenerator(nan_ids=apples, exact=FakeGenerator(nan_ids=rotten)))
    assert [row["row_ordinal"] for row in published(job)] == [0, 1, 3]
    assert [row["reason"] for row in published(job, "rejects")] == ["non_finite"]
    assert counts.rows_recomputed == 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_job_gives_the_texts_that_transformers_gives(tmp_path: Path, kind: str) -> None:
    model = make_headed(tmp_path / "model", kind, AutoModelForCausalLM, vocab_size=400, eos_token_id=0)
    train_tokenizer(model)
    texts = ["the quick", "aaaa ____", "你好 é 😀", "def f(x):\n", "1234 " * 30]
    job = job_with(tmp_path, texts, inference={"model": str(model), "precision": "fp32"})
    run_job(job)
    tokenizer, plain = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model).eval(),
    )
    for text, row in zip(texts, published(job), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, -54:]
        mask = torch.ones_like(ids)
        out = plain.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0)
        new = out[0, ids.shape[1] :]
        assert row["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert row["num_output_tokens"] == len(new)


def test_a_plan_says_how_many_new_tokens_there_may_be_and_how_fast_they_come(tmp_path: Path) -> None:
    model = make_headed(tmp_path / "model", "llama", AutoModelForCausalLM, vocab_size=400, eos_token_id=0)
    train_tokenizer(model)
    job = job_with(tmp_path, inference={"model": str(model), "precision": "fp32", "max_new_tokens": 12})
    plan = estimate(Run.open(job))
    assert plan["infer_tokens_per_second"] > 0
    assert plan["generate_tokens_per_second"] > 0
    assert plan["tokens_generated_at_most"] == pytest.approx(12 * len(TEXTS), rel=0.8)
    assert plan["fits"]


def test_a_report_tells_new_tokens(tmp_path: Path) -> None:
    job = job_with(tmp_path)
    num_new = run(job).tokens_generated
    opened = make_run(job)
    assert rebuild(opened.store)["stages"]["infer"]["tokens_generated"] == num_new
    assert f"{num_new} generated" in opened.store.read_bytes(PAGE_FILE).decode()


def test_misfits_are_told_before_anything_runs(tmp_path: Path) -> None:
    model = make_headed(tmp_path / "model", "llama", AutoModelForCausalLM, vocab_size=400)
    train_tokenizer(model)
    job = job_with(tmp_path, inference={"model": str(model), "max_new_tokens": 64})
    with pytest.raises(ModelMismatchError, match="64 leaves no room for a prompt among the model's 64"):
        run_job(job)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"inference": {"top_p": 0.5}}, "top_p: has no effect at temperature 0"),
        ({"inference": {"num_outputs": 2}}, "num_outputs: has no effect at temperature 0"),
        ({"inference": {"stop": [""]}}, "texts that are not empty"),
        ({"tokenizer": {"overflow": "chunk"}}, "prompts cannot be cut into chunks"),
        ({"input": {"pair": "b"}}, "join the texts with input.template"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, sections: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        job_with(tmp_path, **sections)


def test_texts_end_before_a_stop_string_and_keep_their_first_space() -> None:
    letters = {0: "", 1: "▁a", 2: "▁b", 3: "c."}

    def decode(ids, without_special):
        return "".join(letters[token] for token in ids).replace("▁", " ").lstrip(" ")

    text = Detokenizer(decode, [" b", "."])
    assert text.text([1], [1, 1]) == " a a"
    assert text.text([1], [1, 2, 3]) == " a"
    assert (text.ends([1, 1]), text.ends([1, 2]), text.ends([3])) == (False, True, True)


def test_groups_hold_prompts_of_like_room() -> None:
    assert [group.tolist() for group in plan_groups([9, 100, 8], 10)] == [[1], [0, 2]]
    assert [group.tolist() for group in plan_groups([0, 10], 10)] == [[1, 0]]


def test_streams_are_the_same_everywhere() -> None:
    numbers = [
        stream_number(*key) for key in [(0, "a", 1, 0), (0, "a", 1, 1), (0, "b", 1, 0), (1, "a", 1, 0)]
    ]
    assert len(set(numbers)) == 4
    assert random_stream(7).random() == random_stream(7).random()
