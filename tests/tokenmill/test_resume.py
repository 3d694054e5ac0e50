"""Killed anywhere and run again, an output is the one of a run that was never stopped, byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem
from outputs import jsonl, published, published_bytes, run_fake, tree, write_files

from tokenmill.errors import BackendUnavailableError
from tokenmill.job import Job
from tokenmill.manifest import read_manifest
from tokenmill.store import Store
from tokenmill.testing import FakeBackend, make_job, make_run
from tokenmill.verify import verify


class Killed(BaseException):
    """Stands for a process that ends here."""


@contextmanager
def killed_at(step: int) -> Iterator[list[str]]:
    """Every publication and every deletion is a step; the run ends just before one of them.

    Gives the names of the steps that were reached.
    """
    steps: list[str] = []

    def stopping(original: Callable[..., None], name_of: Callable[..., str]) -> Callable[..., None]:
        def run(*args: object) -> None:
            if len(steps) == step:
                raise Killed
            steps.append(name_of(*args))
            original(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_publish", stopping(Store._publish, lambda store, scratch, name: name))
        patch.setattr(
            LocalFileSystem, "rm_file", stopping(LocalFileSystem.rm_file, lambda fs, path: f"remove {path}")
        )
        yield steps


@pytest.fixture
def job(tmp_path: Path) -> Job:
    rows = [{"text": f"row {n} " + "word " * (n % 7), "lang": "en" if n % 2 else None} for n in range(20)]
    write_files(
        tmp_path,
        {
            "a.jsonl": jsonl(rows[:7]) + "{bad\n",
            "b.jsonl": jsonl(rows[7:12]),
            "c.parquet": pa.table({"text": [None, "x y"], "lang": ["de", None]}),
        },
    )
    return make_job(
        tmp_path,
        input={"keep": ["lang"], "shard_bytes": 1},
        aggregate={"group_by": ["lang"]},
        output={"target_part_bytes": 6000},
        quality={"max_reject_rate": 0.5},
        run={"workers": 1},
    )


def missing(job: Job) -> list[str]:
    """Files that the manifest names and that are not there as it says: what a reader would miss."""
    store = Store.open(job.output.uri)
    manifest, sizes = read_manifest(store), store.sizes()
    return [f.path for f in (manifest.files() if manifest else ()) if sizes.get(f.path) != f.bytes]


def names(folder: Path) -> list[str]:
    return sorted(tree(folder))


def test_a_run_killed_anywhere_and_run_again_is_as_if_never_stopped(job: Job) -> None:
    out = Path(job.output.uri)
    with killed_at(-1) as steps:
        run_fake(job)
    expected, files = published_bytes(job), names(out)
    assert len(steps) > 15
    for step in range(len(steps)):
        shutil.rmtree(out)
        with pytest.raises(Killed), killed_at(step):
            run_fake(job)
        run_fake(job)
        assert published_bytes(job) == expected, f"killed at {steps[step]}"
        assert names(out) == files, f"killed at {steps[step]}"
    assert verify(Store.open(str(out))).problems == ()


def test_a_changed_job_killed_anywhere_ends_as_a_new_one_would(job: Job) -> None:
    out = Path(job.output.uri)
    changed = job.model_copy(update={"tokenizer": job.tokenizer.model_copy(update={"max_tokens": 4})})
    run_fake(changed)
    expected, files = published_bytes(changed), names(out)
    shutil.rmtree(out)
    run_fake(job)
    first = tree(out)
    with killed_at(-1) as steps:
        run_fake(changed)
    assert any(step.startswith("remove") for step in steps)
    for step in range(len(steps)):
        shutil.rmtree(out)
        for name, content in first.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content)
        with pytest.raises(Killed), killed_at(step):
            run_fake(changed)
        assert missing(changed) == [], f"readers lose files if killed at {steps[step]}"
        run_fake(changed)
        assert published_bytes(changed) == expected, f"killed at {steps[step]}"
        assert names(out) == files, f"killed at {steps[step]}"


def test_finished_shards_are_not_done_again(job: Job) -> None:
    out = Path(job.output.uri)
    with pytest.raises(BackendUnavailableError):
        run_fake(job, FakeBackend(failures=1))
    tokens = {name: (out / name).stat().st_mtime_ns for name in names(out) if name.startswith("tokens")}
    assert tokens
    run_fake(job)
    assert {name: (out / name).stat().st_mtime_ns for name in tokens} == tokens
    untouched = {name: (out / name).stat().st_mtime_ns for name in names(out)}
    idle = FakeBackend(failures=10**6)
    run_fake(job, idle)
    assert idle.failures == 10**6
    assert {name: (out / name).stat().st_mtime_ns for name in names(out)} == untouched


def test_a_new_file_adds_a_shard_and_leaves_the_others(job: Job) -> None:
    run_fake(job)
    before = published(job)
    write_files(Path(str(job.input.uri)).parent, {"bb.jsonl": jsonl(["new one"])})
    backend = FakeBackend()
    run_fake(job, backend)
    assert backend.shapes == [(1, 4)]
    after = published(job)
    assert len(after) == len(before) + 1
    assert [row for row in after if "bb.jsonl" not in row["source_file"]] == before
    assert verify(Store.open(job.output.uri)).problems == ()


def test_a_file_that_went_away_takes_its_rows_with_it(job: Job) -> None:
    run_fake(job)
    (Path(str(job.input.uri)) / "b.jsonl").unlink()
    run_fake(job)
    assert len(published(job)) == 7 + 1
    assert verify(Store.open(job.output.uri)).problems == ()


@pytest.mark.parametrize("folder", ["tokens", "parts", "results", "rejects", "groups", "receipts"])
def test_what_is_lost_of_an_output_is_made_again(job: Job, folder: str) -> None:
    out = Path(job.output.uri)
    run_fake(job)
    expected, files = published_bytes(job), names(out)
    for path in sorted((out / folder).iterdir())[:1]:
        path.unlink()
    if folder == "rejects":
        for receipt in (out / "receipts").iterdir():
            receipt.unlink()
    run_fake(job)
    assert published_bytes(job) == expected
    assert names(out) == files


def test_a_published_file_that_was_cut_short_is_made_again(job: Job) -> None:
    run_fake(job)
    expected = published_bytes(job)
    path = next(iter((Path(job.output.uri) / "results").iterdir()))
    content = path.read_bytes()
    path.unlink()  # it may share its bytes with a part
    path.write_bytes(content[:-10])
    run_fake(job)
    assert published_bytes(job) == expected


def test_two_runs_at_once_end_as_one(job: Job) -> None:
    run_fake(job)
    expected = published_bytes(job)
    shutil.rmtree(job.output.uri)
    first, second = make_run(job), make_run(job)
    plan = first.plan()
    for run in (first, second):
        run.claim(plan)
    for shard in plan.shards:
        for run in (first, second):
            run.tokenize(shard)
        for run in (second, first):
            run.infer(shard, FakeBackend())
    for run in (first, second):
        run.publish(plan, run.collect(plan))
    assert published_bytes(job) == expected
    assert verify(Store.open(job.output.uri)).problems == ()
