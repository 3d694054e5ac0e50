"""SIGKILL to real processes at chosen points; after the next run all is as if nothing had happened.

A small model with torch, 24 shards, rejects among them, two workers. What is compared: every file of the
output byte for byte, receipts (they hold times) by name.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from crash_runs import KILLED, CrashServer, Ended, crash_server
from outputs import jsonl, published, tree, write_files

from tokenmill.job import Job
from tokenmill.store import Store
from tokenmill.testing import make_job
from tokenmill.verify import verify

NUM_FILES, NUM_ROWS = 24, 20
Output = dict[str, bytes | None]


def file_of(number: int, saying: str = "word") -> str:
    """20 rows, and in every fifth file a line that is none."""
    rows = [
        {"text": f"file {number} row {row} " + f"{saying} " * (row % 7), "k": str(row % 2)}
        for row in range(NUM_ROWS)
    ]
    return jsonl(rows) + ("{bad\n" if number % 5 == 0 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job, the output that it finds, and the one that it leaves.  steps: of an undisturbed run."""

    job: Job
    before: Path
    after: Output
    steps: list[str]

    @property
    def out(self) -> Path:
        return Path(self.job.output.uri)

    def restore(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.before.exists():
            shutil.copytree(self.before, self.out)

    def check(self, what: str) -> None:
        """What is there is what an undisturbed run leaves, scratch files included."""
        assert output_of(self.out) == self.after, what
        assert verify(Store.open(str(self.out))).problems == (), what


def output_of(out: Path) -> Output:
    return {name: None if name.startswith("receipts/") else data for name, data in tree(out).items()}


def completed(ended: Ended) -> Ended:
    assert (ended.status, ended.told) == (0, "")
    return ended


@pytest.fixture(scope="module")
def server() -> Iterator[CrashServer]:
    with crash_server() as server:
        yield server


@pytest.fixture(scope="module", params=["a first run", "a changed corpus"])
def case(
    request: pytest.FixtureRequest, server: CrashServer, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    """An empty output; and one in which an older version of the dataset is published."""
    folder = tmp_path_factory.mktemp("crash")
    make_checkpoint(folder / "model")
    write_files(folder, {f"{n:02d}.jsonl": file_of(n) for n in range(NUM_FILES)})
    job = make_job(
        folder,
        input={"keep": ["k"], "shard_bytes": 1},
        inference={"model": str(folder / "model")},
        aggregate={"group_by": ["k"]},
        output={"target_part_bytes": 20_000},
        quality={"max_reject_rate": 0.5},
        run={"workers": 2, "threads": 1},
    )
    server.warm(job)
    if request.param == "a changed corpus":
        completed(server.run(job))
        shutil.copytree(job.output.uri, folder / "before")
        (folder / "in" / "07.jsonl").unlink()
        write_files(folder, {f"{n:02d}.jsonl": file_of(n, "other words") for n in (0, 3, 11, 12, 20)})
        write_files(folder, {"05b.jsonl": file_of(99)})
    steps = completed(server.run(job)).steps
    return Case(job=job, before=folder / "before", after=output_of(Path(job.output.uri)), steps=steps)


def chosen(steps: list[str], number: int) -> list[int]:
    """Places among the steps: every kind of step in turn, and of a kind evenly from first to last."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(steps):
        places[name].append(place)
    share = Counter(name for name, _ in zip(itertools.cycle(sorted(places)), range(number), strict=False))
    points = [
        found[turn * (len(found) - 1) // max(1, share[name] - 1)]
        for name, found in places.items()
        for turn in range(min(share[name], len(found)))
    ]
    spare = sorted(set(range(len(steps))) - set(points))
    missing = number - len(set(points))
    return sorted({*points, *spare[:: max(1, len(spare) // max(1, missing))][: max(0, missing)]})


def test_every_row_is_there_once(case: Case) -> None:
    """What the others compare with is right itself."""
    case.restore()
    for name, data in case.after.items():
        path = case.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is not None:
            path.write_bytes(data)
    rows = [(row["source_file"], row["row_ordinal"]) for row in published(case.job)]
    rejects = [(row["source_file"], row["row_ordinal"]) for row in published(case.job, "rejects")]
    corpus = [
        (str(path), ordinal)
        for path in sorted((case.out.parent / "in").iterdir())
        for ordinal in range(len(path.read_text().splitlines()))
    ]
    assert sorted(rows + rejects) == corpus
    assert len(rejects) == 5
    assert len(json.loads((case.out / "manifest.json").read_bytes())["shards"]) == 24


def test_a_run_killed_at_a_point_and_run_again_leaves_what_one_does_that_was_not(
    case: Case, server: CrashServer
) -> None:
    """A sample; the suite of real services takes a hundred."""
    kill_at_each(case, server, 6)


@pytest.mark.service
def test_a_run_killed_at_any_of_a_hundred_points_leaves_what_one_does_that_was_not(
    case: Case, server: CrashServer
) -> None:
    """Fifty a case: about three minutes on two cores."""
    kill_at_each(case, server, 50)


def kill_at_each(case: Case, server: CrashServer, number: int) -> None:
    """Every third time the run after it is killed too, and only the third one ends."""
    points = chosen(case.steps, number)
    assert len(points) == number
    for turn, point in enumerate(points):
        case.restore()
        when = ("before", "after")[turn % 2]
        what = f"{when} step {point} of {len(case.steps)}: {case.steps[point]}"
        assert server.run(case.job, step=point, when=when).status == KILLED, what
        check_readable(case, what)
        if turn % 3 == 0:
            again = server.run(case.job, step=[40, 7, 90][turn // 3 % 3], when=when)
            what += f"; and again: {again.status}"
            check_readable(case, what)
        completed(server.run(case.job))
        case.check(what)


def check_readable(case: Case, what: str) -> None:
    """Whoever reads what is published gets the old version whole or the new one whole."""
    manifest = case.out / "manifest.json"
    if not manifest.exists():
        return
    whole = [data for name, data in case.after.items() if name == "manifest.json"]
    if case.before.exists():
        whole.append((case.before / "manifest.json").read_bytes())
    assert manifest.read_bytes() in whole, what
    named = {file["path"]: file for kind in KINDS for file in json.loads(manifest.read_bytes())[kind]}
    assert {path: (case.out / path).stat().st_size for path in named} == {
        path: file["bytes"] for path, file in named.items()
    }, what


KINDS = ("results", "tokens", "rejects", "groups")


@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.5])
def test_a_run_killed_at_any_moment_is_mended_by_the_next(
    case: Case, server: CrashServer, after_s: float
) -> None:
    """Wherever that is: in the middle of compiled code, of a write, of nothing."""
    case.restore()
    ended = server.run(case.job, kill_after_s=after_s)
    assert ended.status == KILLED, ended
    check_readable(case, f"{after_s} s")
    completed(server.run(case.job))
    case.check(f"{after_s} s")


def test_a_clock_set_back_by_days_changes_nothing(case: Case, server: CrashServer) -> None:
    """For the run after a kill, what the killed one left was written days ahead of its time."""
    case.restore()
    assert server.run(case.job, step=len(case.steps) // 2).status == KILLED
    for path in case.out.rglob("*"):
        later = path.stat().st_mtime + 3 * 86_400
        os.utime(path, (later, later))
    completed(server.run(case.job, clock="back"))
    case.check("clock set back")
    for path in (case.out / "receipts").iterdir():
        assert all(value >= 0 for value in json.loads(path.read_bytes())["seconds"].values())


def test_nothing_is_written_where_nothing_is_left_to_do(case: Case, server: CrashServer) -> None:
    case.restore()
    completed(server.run(case.job))
    before = {path: path.stat().st_mtime_ns for path in case.out.rglob("*") if path.is_file()}
    again = completed(server.run(case.job))
    assert not {"infer", "tokenize", "manifest", "delete out"} & set(again.steps)
    assert {path: path.stat().st_mtime_ns for path in case.out.rglob("*") if path.is_file()} == before
