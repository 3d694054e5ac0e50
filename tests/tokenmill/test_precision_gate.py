"""Low precision: held against float32 on the job's own rows, and refused where it is worse or slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import copy_tokenizer, make_headed
from outputs import MINILM, jsonl, published, write_files
from transformers import AutoModelForSequenceClassification

from tokenmill import precision_gate, torch_device
from tokenmill.engine import Run, run_job
from tokenmill.errors import ConfigError
from tokenmill.job import Job
from tokenmill.precision_gate import GATE_TOKENS, MEASURES, Agreement, hold_against_fp32
from tokenmill.sample import sample_shards, sample_windows
from tokenmill.settle import InferSetup
from tokenmill.testing import FakeBackend, make_job, make_run

TEXTS = [f"{word} of number {n}, and {word} again" for n in range(30) for word in ("Rain", "Träume", "数据")]


def job_with(folder: Path, texts: list[str] = TEXTS, **overrides: Any) -> Job:
    write_files(folder, {f"{n}.jsonl": jsonl(texts[n::3]) for n in range(3)})
    inference = {"model": MINILM, "precision": "int8", **overrides.pop("inference", {})}
    return make_job(folder, inference=inference, input={"shard_bytes": 1}, **overrides)


def check(job: Job) -> Agreement | None:
    run = Run.open(job)
    return run.check_model(sample_shards(run.plan().shards))


def test_an_int8_job_is_near_its_fp32_twin_and_says_how_near(tmp_path: Path) -> None:
    job, twin = job_with(tmp_path / "a"), job_with(tmp_path / "b", inference={"precision": "fp32"})
    found = check(job)
    assert found is not None
    assert (found.precision, found.measure, found.rows) == ("int8", "mean cosine", 90)
    run_job(job)
    run_job(twin)
    vectors, exact = (np.array([row["embedding"] for row in published(one)]) for one in (job, twin))
    cosines = (vectors * exact).sum(axis=1)
    assert cosines.mean() == pytest.approx(found.value, abs=1e-5)
    assert 0.98 < cosines.min() < 0.99999
    assert found.value > 0.995


def test_too_little_agreement_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = job_with(tmp_path, inference={"min_agreement": 0.99999})
    with pytest.raises(
        ConfigError, match=r"int8 agrees with fp32 by 0\.99\d\d only \(mean cosine of 90 rows"
    ):
        run_job(job)
    assert not (tmp_path / "out").exists()


def test_labels_are_compared_by_the_decisions(tmp_path: Path) -> None:
    model = make_headed(
        tmp_path / "model", "bert", AutoModelForSequenceClassification, id2label={0: "a", 1: "b", 2: "c"}
    )
    copy_tokenizer(model)
    job = job_with(tmp_path, inference={"model": str(model), "task": "classify"})
    found = check(job)
    assert found is not None
    assert found.measure == "share of the same labels"
    assert found.value > 0.99


@pytest.mark.parametrize(
    ("task", "exact", "low", "threshold", "value"),
    [
        ("embed", [[1, 0], [0, 2]], [[1, 0], [2, 0]], None, 0.5),
        ("embed", [[0, 0]], [[0, 0]], None, 0),
        ("classify", [[0.4, 0.6], [0.7, 0.3]], [[0.1, 0.9], [0.4, 0.6]], None, 0.5),
        ("classify", [[0.4, 0.6], [0.7, 0.6]], [[0.1, 0.9], [0.4, 0.6]], 0.5, 0.5),
        ("rank", [[1], [2], [3]], [[10], [20], [30]], None, 1),
        ("rank", [[1], [2], [3]], [[3], [2], [1]], None, -1),
        ("rank", [[5], [5]], [[5], [5]], None, 1),
        ("score", [[10, 3], [20, 3], [0, 0]], [[11, 3], [20, 3], [0, 0]], None, 0.95),
        ("score", [[0, 0]], [[0, 0]], None, 1),
    ],
)
def test_the_measure_of_each_task(
    task: str, exact: list[Any], low: list[Any], threshold: float | None, value: float
) -> None:
    agree = MEASURES[task][1]
    found = agree(np.array(exact, dtype=float), np.array(low, dtype=float), threshold)
    assert found == pytest.approx(value)


def setup_of(job: Job) -> InferSetup:
    return make_run(job).setup.need_model()


def test_what_does_not_agree_or_is_nan_does_not_pass(tmp_path: Path) -> None:
    job = job_with(tmp_path, inference={"model": "fake-model"})
    run = make_run(job)
    windows = list(sample_windows(run.setup, run.plan().shards, run.storages.input, run.store, max_rows=64))
    same = FakeBackend(exact=FakeBackend())
    assert hold_against_fp32(windows, same, setup_of(job), None).value == pytest.approx(1)  # type: ignore[union-attr]
    assert hold_against_fp32([], same, setup_of(job), None) is None
    others = FakeBackend(exact=OtherVectors())
    with pytest.raises(ConfigError, match="agrees with fp32 by"):
        hold_against_fp32(windows, others, setup_of(job), None)


class OtherVectors(FakeBackend):
    def vector(self, ids: Any) -> Any:
        return super().vector(ids)[::-1].copy()


def test_the_sample_is_spread_and_bounded(tmp_path: Path) -> None:
    job = job_with(tmp_path, ["word " * 400] * 90, inference={"model": "fake-model"})
    run = make_run(job)
    backend = FakeBackend(exact=FakeBackend())
    shards = sample_shards(run.plan().shards)
    assert [shard.index for shard in shards] == [0, 1, 2]
    windows = sample_windows(run.setup, shards, run.storages.input, run.store, max_rows=64)
    found = hold_against_fp32(windows, backend, setup_of(job), None)
    assert found is not None
    assert 0 < found.tokens <= 3 * GATE_TOKENS


def test_a_sample_of_tokenized_shards_needs_no_corpus(tmp_path: Path) -> None:
    job = job_with(tmp_path, [*TEXTS, ""], inference={"model": "fake-model"})
    run = make_run(job)
    plan = run.plan()
    run.claim(plan)
    for shard in plan.shards:
        run.tokenize(shard)
    claimed = run.claimed_plan()
    assert all(shard.slices == () for shard in claimed.shards)
    found = [
        list(sample_windows(run.setup, shards, run.storages.input, run.store, max_rows=20))
        for shards in (plan.shards, claimed.shards)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.offsets_N1.tolist() == theirs.offsets_N1.tolist()


def test_int8_that_is_slower_than_fp32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_gate, "SLOWER", 1000)
    monkeypatch.setattr(precision_gate, "TIMED_S", 0)
    with pytest.raises(ConfigError, match=r"int8 runs at \d\.\d\d of the speed of fp32 on this machine"):
        check(job_with(tmp_path))


def test_bf16_that_is_slower_than_fp32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_with(tmp_path, inference={"precision": "bf16", "device": "cpu"})
    monkeypatch.setattr(torch_device, "layer_speed", lambda precision, device: 0.31)
    with pytest.raises(ConfigError, match=r"bf16 runs at 0\.31 of the speed of fp32 on this CPU; use fp32"):
        run_job(job)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(torch_device, "device_memory", lambda device: 50 << 20)  # float32 would not fit
    run_job(job)


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        ({"task": "generate"}, "precision: int8 is not to generate"),
        ({"precision": "bf16", "min_agreement": 0.9}, "min_agreement: only for precision int8, not for bf16"),
    ],
)
def test_misfits_are_told(tmp_path: Path, inference: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_with(tmp_path, inference=inference)
