"""Inference over fakes: memory that runs out, values that are not finite, batches that stay in budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from outputs import jsonl, published, run_fake, write_files

from tokenmill.backend import BackendInfo
from tokenmill.errors import BackendError, BackendUnavailableError, is_transient
from tokenmill.job import Job
from tokenmill.progress import reporting_to
from tokenmill.receipts import Receipt
from tokenmill.testing import FakeBackend, make_job, make_run, word_id

SENTENCES = [f"word{n} " * length for n, length in enumerate([1, 9, 4, 4, 2, 7, 4, 1, 3, 12])]


def job_with(folder: Path, texts: list[str], **overrides) -> Job:
    write_files(folder, {"a.jsonl": jsonl(texts)})
    return make_job(folder, quality={"max_reject_rate": 1}, **overrides)


def infer(job: Job, backend: FakeBackend) -> Receipt:
    run = make_run(job)
    (shard,) = run.plan().shards
    run.tokenize(shard)
    return run.infer(shard, backend)


def test_batches_keep_the_budget_and_come_longest_first(tmp_path: Path) -> None:
    backend = FakeBackend()
    infer(job_with(tmp_path, SENTENCES, run={"max_batch_tokens": 14}), backend)
    assert backend.shapes == [(1, 14), (1, 11), (1, 9), (2, 6), (1, 6), (1, 5), (3, 4)]


def test_the_budget_is_the_backends_own_unless_the_job_sets_one(tmp_path: Path) -> None:
    backend = FakeBackend(default_batch_tokens=20)
    receipt = infer(job_with(tmp_path, SENTENCES), backend)
    assert max(rows * longest for rows, longest in backend.shapes) <= 20
    assert receipt.max_batch_tokens == 20


@pytest.mark.parametrize("window_rows", [1, 3, 10, 100])
def test_rows_come_back_in_order_whatever_the_window(tmp_path: Path, window_rows: int) -> None:
    job = job_with(tmp_path, SENTENCES, run={"window_rows": window_rows})
    run_fake(job)
    found = published(job)
    assert [row["row_ordinal"] for row in found] == list(range(10))
    assert [row["num_tokens"] for row in found] == [len(text.split()) + 2 for text in SENTENCES]


def test_memory_that_runs_out_halves_the_batch_and_changes_no_result(tmp_path: Path) -> None:
    job = job_with(tmp_path, SENTENCES, run={"max_batch_tokens": 1000})
    run_fake(job)
    expected = published(job)
    small = job_with(tmp_path / "small", SENTENCES, run={"max_batch_tokens": 1000})
    backend = FakeBackend(memory_tokens=20)
    counts = run_fake(small, backend).counts
    found = published(small)
    assert [row["embedding"] for row in found] == [row["embedding"] for row in expected]
    assert all(rows * longest <= 20 for rows, longest in backend.shapes)
    assert counts.out_of_memory > 0
    assert (counts.rows_out, counts.rows_rejected) == (10, 0)


def test_the_lower_budget_holds_for_the_windows_that_follow(tmp_path: Path) -> None:
    texts = [f"w{n} x y z" for n in range(40)]
    backend = FakeBackend(memory_tokens=12)
    job = job_with(tmp_path, texts, run={"max_batch_tokens": 48, "window_rows": 10})
    receipt = infer(job, backend)
    assert receipt.counts.out_of_memory == 2
    assert receipt.max_batch_tokens == 12
    assert receipt.counts.rows_out == 40


def test_a_row_that_never_fits_is_a_reject_and_the_others_are_not(tmp_path: Path) -> None:
    job = job_with(tmp_path, SENTENCES)
    counts = run_fake(job, FakeBackend(memory_tokens=8)).counts
    rejects = published(job, "rejects")
    assert [(row["row_ordinal"], row["reason"], row["stage"]) for row in rejects] == [
        (1, "out_of_memory", "infer"),
        (5, "out_of_memory", "infer"),
        (9, "out_of_memory", "infer"),
    ]
    assert [row["row_ordinal"] for row in published(job)] == [0, 2, 3, 4, 6, 7, 8]
    assert counts.rejects == {"out_of_memory": 3}


def test_values_that_are_not_finite_are_rejects(tmp_path: Path) -> None:
    job = job_with(tmp_path, ["good", "bad apple", "good too", "bad apple"])
    counts = run_fake(job, FakeBackend(nan_ids=frozenset({word_id("apple")}))).counts
    assert [row["row_ordinal"] for row in published(job)] == [0, 2]
    rejects = published(job, "rejects")
    assert [(row["row_ordinal"], row["detail"]) for row in rejects] == [
        (1, "the model gave NaN or infinity, or more than inference.dtype can hold"),
        (3, "the model gave NaN or infinity, or more than inference.dtype can hold"),
    ]
    assert counts.rejects == {"non_finite": 2}


def test_what_low_precision_loses_is_computed_again_in_fp32(tmp_path: Path) -> None:
    texts = ["good", "bad apple", "good too", "bad apple", "a rotten apple"]
    apples = frozenset({word_id("apple")})
    exact = FakeBackend(nan_ids=frozenset({word_id("rotten")}))
    job = job_with(tmp_path / "low", texts)
    counts = run_fake(job, FakeBackend(nan_ids=apples, exact=exact)).counts
    rows = published(job)
    assert [row["row_ordinal"] for row in rows] == [0, 1, 2, 3]
    assert [row["reason"] for row in published(job, "rejects")] == ["non_finite"]
    assert (counts.rows_recomputed, counts.rejects) == (2, {"non_finite": 1})
    plain = job_with(tmp_path / "plain", texts[:4])
    run_fake(plain)
    assert [row["embedding"] for row in rows] == [row["embedding"] for row in published(plain)]


def test_the_copy_in_fp32_may_be_short_of_memory(tmp_path: Path) -> None:
    apples = frozenset({word_id("apple")})
    job = job_with(tmp_path, ["good", "bad apple", "one two three four apple"])
    exact = FakeBackend(memory_tokens=5)
    counts = run_fake(job, FakeBackend(nan_ids=apples, exact=exact)).counts
    assert [row["row_ordinal"] for row in published(job)] == [0, 1]
    assert (counts.rows_recomputed, counts.rejects) == (1, {"non_finite": 1})


class HugeBackend(FakeBackend):
    """Vectors that float32 holds and float16 does not, for rows of more than three tokens."""

    def vector(self, ids):
        return np.full(self.dimensions, 1e5 if len(ids) > 3 else 1.0, dtype=np.float32)


def test_what_half_floats_cannot_hold_is_a_reject(tmp_path: Path) -> None:
    job = job_with(tmp_path, ["one", "two words"], inference={"dtype": "float16"})
    run_fake(job, HugeBackend())
    assert [row["row_ordinal"] for row in published(job)] == [0]
    assert [row["reason"] for row in published(job, "rejects")] == ["non_finite"]


def test_a_backend_that_is_busy_is_transient_and_leaves_nothing_of_the_shard(tmp_path: Path) -> None:
    job = job_with(tmp_path, SENTENCES)
    with pytest.raises(BackendUnavailableError) as caught:
        infer(job, FakeBackend(failures=1))
    assert is_transient(caught.value)
    names = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len([name for name in names if name.startswith("infer")]) == 0
    assert not (tmp_path / "out" / "parts").exists()


class ShortBackend(FakeBackend):
    """Gives one row too few."""

    def run(self, ids_BL, lengths_B, starts_B=None):
        return super().run(ids_BL, lengths_B, starts_B)[1:]


def test_a_backend_that_loses_a_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="the backend gave"):
        infer(job_with(tmp_path, SENTENCES), ShortBackend())


def test_an_empty_shard_has_a_part_a_receipt_and_finite_figures(tmp_path: Path) -> None:
    job = job_with(tmp_path, [])
    receipt = infer(job, FakeBackend())
    assert (receipt.part.rows, receipt.counts.rows_in) == (0, 0)
    assert receipt.idle_share == 1.0
    assert all(np.isfinite(value) for value in receipt.throughput().values() if not isinstance(value, str))


def test_counts_of_a_shard(tmp_path: Path) -> None:
    texts = ["a b", "a b", "c", "d e f g"]
    receipt = infer(job_with(tmp_path, texts, run={"max_batch_tokens": 12}), FakeBackend())
    counts = receipt.counts
    assert (counts.rows_in, counts.rows_out, counts.tokens) == (4, 4, 4 + 4 + 3 + 6)
    assert counts.tokens_computed == 4 + 3 + 6
    assert counts.tokens_padded == 6 + 2 * 4
    assert counts.batches == receipt.latency_s.total == 2
    assert counts.effective_token_ratio == pytest.approx(13 / 14)


class Recorder:
    def __init__(self) -> None:
        self.rows = {"tokenize": 0, "infer": 0}
        self.tokens = {"tokenize": 0, "infer": 0}
        self.shards: list[str] = []

    def advance(self, stage: str, rows: int, tokens: int) -> None:
        self.rows[stage] += rows
        self.tokens[stage] += tokens

    def shard_done(self, stage: str) -> None:
        self.shards.append(stage)


def test_progress_adds_up_to_every_row_and_token(tmp_path: Path) -> None:
    recorder, job = Recorder(), job_with(tmp_path, [*SENTENCES, *SENTENCES], run={"window_rows": 7})
    with reporting_to(recorder):
        counts = run_fake(job).counts
    assert recorder.rows == {"tokenize": 20, "infer": 20}
    assert recorder.tokens == {"tokenize": counts.tokens, "infer": counts.tokens}
    assert recorder.shards == ["tokenize", "infer"]


def test_the_fake_backend_describes_itself() -> None:
    info = FakeBackend(dimensions=3).info
    assert isinstance(info, BackendInfo)
    assert (info.num_values, info.pad_id, FakeBackend().device_memory_bytes()) == (3, 0, 0)
    with pytest.raises(AssertionError, match="not padded"):
        FakeBackend().run(np.array([[5, 6]]), np.array([1]))
