"""Tokenizing a shard: every dropped, unknown or removed thing is counted, every refusal has a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from outputs import jsonl, published, run_fake, write_files

from tokenmill.engine import Run
from tokenmill.job import Job
from tokenmill.receipts import Receipt
from tokenmill.testing import END, FAKE_INFO, START, FakeTokenizer, make_job, make_run, word_id


def job_with(folder: Path, rows: list, **overrides) -> Job:
    write_files(folder, {"a.jsonl": jsonl(rows)})
    return make_job(folder, quality={"max_reject_rate": 1}, **overrides)


def tokenize(run: Run) -> Receipt:
    (shard,) = run.plan().shards
    return run.tokenize(shard)


def test_a_token_row_is_complete(tmp_path: Path) -> None:
    rows = [{"text": f"a b {'c' * 101}", "doc": 7, "label": "x", "score": 0.5, "reason": None}]
    job = job_with(tmp_path, rows, input={"id": "doc", "keep": ["label", "score", "reason"]})
    run_fake(job)
    assert published(job, "tokens") == [
        {
            "source_file": str(tmp_path / "in" / "a.jsonl"),
            "row_ordinal": 0,
            "id": "7",
            "label": "x",
            "score": "0.5",
            "reason": None,
            "chunk_index": 0,
            "input_ids": [START, word_id("a"), word_id("b"), 3, END],
            "num_tokens": 5,
            "num_tokens_dropped": 0,
            "num_unknown": 1,
        }
    ]


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    texts = ["a b c d e f", "a", "", " \n ", "x \ud800"]
    counts = tokenize(make_run(job_with(tmp_path, texts, tokenizer={"max_tokens": 5}))).counts
    assert (counts.rows_in, counts.rows_out, counts.rows_truncated) == (5, 5, 1)
    assert (counts.tokens, counts.tokens_dropped) == (5 + 3 + 2 + 2 + 4, 3)
    assert (counts.rows_blank, counts.rows_scrubbed, counts.chars_replaced) == (2, 1, 1)


def test_rows_that_are_too_long_can_be_rejected(tmp_path: Path) -> None:
    job = job_with(tmp_path, ["a b c d", "a b c"], tokenizer={"max_tokens": 5, "overflow": "reject"})
    run_fake(job)
    (reject,) = published(job, "rejects")
    assert (reject["row_ordinal"], reject["reason"]) == (0, "too_long")
    assert reject["detail"] == "6 tokens, tokenizer.max_tokens is 5"
    assert reject["text"] == "a b c d"


def test_ids_that_the_model_does_not_know_are_rejects_not_crashes(tmp_path: Path) -> None:
    run = make_run(job_with(tmp_path, ["small", "large one", "small"]))
    limit = max(word_id("large"), word_id("one"))
    setup = replace(run.setup, tokenize=replace(run.setup.tokenize, model_vocab_size=limit))
    counts = tokenize(replace(run, setup=setup)).counts
    assert counts.rejects["id_unknown_to_model"] >= 1
    assert counts.rows_out + counts.rows_rejected == 3


def test_a_text_without_any_token_is_a_reject_where_the_model_adds_none(tmp_path: Path) -> None:
    bare = FakeTokenizer(replace(FAKE_INFO, prefix_ids=(), suffix_ids=()))
    counts = tokenize(make_run(job_with(tmp_path, ["", "a"]), bare)).counts
    assert (counts.rows_out, counts.rejects) == (1, {"no_tokens": 1})


def test_special_tokens_around_a_row_are_not_unknown_even_if_they_share_an_id(tmp_path: Path) -> None:
    """As GPT-2, whose one special token is also its unknown one."""
    shared = FakeTokenizer(replace(FAKE_INFO, unknown_id=END))
    counts = tokenize(make_run(job_with(tmp_path, ["a", "b c"]), shared)).counts
    assert counts.tokens_unknown == 0


def test_a_prompt_comes_before_every_text(tmp_path: Path) -> None:
    job = job_with(tmp_path, ["a"], tokenizer={"prompt": "query: "})
    run_fake(job)
    assert published(job, "tokens")[0]["input_ids"] == [START, word_id("query:"), word_id("a"), END]


def test_rows_of_many_files_and_kinds_share_a_shard(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.csv": "text,k\nx,1\n",
            "b.jsonl": jsonl([{"text": "y", "k": "2"}]),
            "c.parquet": pa.table({"text": ["z"], "k": pa.array(["3"]).dictionary_encode()}),
            "d.parquet": pa.table({"text": ["zz"], "k": pa.array(["4"], pa.large_string())}),
        },
    )
    job = make_job(tmp_path, input={"keep": ["k"]})
    assert len(make_run(job).plan().shards) == 1
    run_fake(job)
    assert [row["k"] for row in published(job)] == ["1", "2", "3", "4"]


def test_rejects_are_in_order_of_rows_and_hold_a_sample(tmp_path: Path) -> None:
    texts = ["x" * 3000, "ok", "y z w v u t"]
    job = job_with(
        tmp_path, texts, input={"max_row_bytes": 1024}, tokenizer={"max_tokens": 4, "overflow": "reject"}
    )
    run_fake(job)
    rejects = published(job, "rejects")
    assert [(row["row_ordinal"], row["reason"]) for row in rejects] == [(0, "row_too_large"), (2, "too_long")]
    assert len(rejects[0]["text"]) <= 2000


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_shards_of_any_size(tmp_path: Path, rows: int) -> None:
    receipt = tokenize(make_run(job_with(tmp_path, ["a"] * rows)))
    assert (receipt.part.rows, receipt.counts.rows_in, receipt.lengths.total) == (rows, rows, rows)
    assert receipt.throughput()["rows"] == rows
