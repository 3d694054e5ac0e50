"""A process that runs jobs in children of its own, and kills them where it is told to.

    parent test --one JSON line a run--> this process --fork--> a child that runs the engine, and dies

Every run is a process that really gets SIGKILL, yet does not import everything anew. Nothing of this is
in the engine: the child counts calls of what reads, computes, writes and deletes, and ends itself at
one of them. Started by `crash_runs.CrashServer`; not a test.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401 - imported where it is used, in each child anew otherwise
import pyarrow.parquet as pq
import torch
from fsspec.implementations.local import LocalFileSystem

import tokenmill.encoding
import tokenmill.stages.aggregate
import tokenmill.stages.infer_shard
import tokenmill.stages.tokenize_shard
from tokenmill.engine import Run, finish
from tokenmill.errors import TokenmillError
from tokenmill.job import Job
from tokenmill.torch_backend import TorchBackend


def _folder_of(path: object) -> str:
    """What kind of file it is. Example: ".../out/receipts/x.json" -> "receipts"."""
    found = Path(str(path))
    known = ("tokens", "parts", "results", "rejects", "groups", "receipts", "versions", ".tmp")
    return found.parent.name if found.parent.name in known else found.name


# What a run does, by the name under which it is counted; `place` is the argument that holds the path.
POINTS: list[tuple[str, object, str, int | None]] = [
    ("read", tokenmill.stages.tokenize_shard, "read_slice", None),
    ("tokenize", tokenmill.stages.tokenize_shard, "encode_rows", None),
    ("batch", tokenmill.stages.infer_shard, "plan_batches", None),
    ("infer", TorchBackend, "run", None),
    ("rows of", pq.ParquetWriter, "write_table", None),
    ("footer", pq.ParquetWriter, "close", None),
    ("bytes of", Path, "write_bytes", None),
    ("flush", os, "fsync", None),
    ("publish", Path, "replace", 1),
    ("link", os, "link", None),
    ("folder", Path, "mkdir", 0),
    ("delete", LocalFileSystem, "rm_file", 1),
    ("probe", tempfile, "NamedTemporaryFile", None),
    ("compact", tokenmill.stages.aggregate, "_compact", None),
    ("group", tokenmill.stages.aggregate, "group_rows", None),
    ("manifest", tokenmill.stages.aggregate, "write_manifest", None),
    ("prune", tokenmill.stages.aggregate, "prune", None),
]


class Counter:
    """Counts the calls of POINTS; the process ends at the chosen one, before or after it."""

    def __init__(self, step: int | None, when: str) -> None:
        self.steps: list[str] = []
        self._step, self._when = step, when

    def install(self) -> None:
        for label, owner, name, place in POINTS:
            setattr(owner, name, self._counted(label, getattr(owner, name), place))

    def _counted(self, label: str, original: Callable[..., Any], place: int | None) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            self.steps.append(f"{label} {_folder_of(args[place])}" if place is not None else label)
            dies = len(self.steps) - 1 == self._step
            if dies and self._when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and label == "bytes of":
                args = (args[0], args[1][: len(args[1]) // 2])
            result = original(*args, **options)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def _set_clock_back() -> None:
    """The wall clock of this process runs backwards, a day a second."""
    real, start = time.time, time.time()
    time.time = lambda: start - (real() - start) * 86_400  # type: ignore[assignment]


def _child(order: dict[str, Any], report: int) -> None:
    counter = Counter(order.get("step"), order.get("when", "before"))
    counter.install()
    if order.get("clock") == "back":
        _set_clock_back()
    told = ""
    try:
        finish(Run.open(Job.parse(order["job"])))
    except TokenmillError as exc:
        told = f"{type(exc).__name__}: {exc}"
    except BaseException:  # noqa: BLE001 - the parent test shows it
        told = traceback.format_exc()
    os.write(report, json.dumps({"steps": counter.steps, "told": told}).encode())
    os._exit(1 if told else 0)


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """How a child ended: its exit status (-9 for SIGKILL), the steps it took and its error, if it lived."""
    reading, report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(order, report)
    os.close(report)
    if (after_s := order.get("kill_after_s")) is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"steps": [], "told": "", **(json.loads(said) if said else {}), "status": status}


def main() -> None:
    """Serve orders from standard input until it ends."""
    torch.set_num_threads(1)
    if "--no-fsync" in sys.argv:
        os.fsync = lambda handle: None  # type: ignore[assignment]
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("warm"):
            # Tokenizer and model are loaded once for all children, by this one thread.
            Run.open(Job.parse(order["job"])).setup.need_model().load_backend()
            answer: dict[str, Any] = {"status": 0}
        else:
            answer = _run(order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
