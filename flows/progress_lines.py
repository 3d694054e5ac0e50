"""Showing how far a run is: bars on a terminal, plain lines in a log.

Both are `tokenmill.progress.Reporter`s. `reporting` picks the one that fits where the flow runs.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tokenmill.plan import Plan, Shard, Todo
from tokenmill.progress import Reporter, reporting_to
from tokenmill.quantities import counted

Style = Literal["log", "terminal", "none"]

LINE_EVERY_S = 10.0

_style: ContextVar[Style] = ContextVar("tokenmill_progress_style", default="log")


@contextmanager
def progress_style(style: Style) -> Iterator[None]:
    """How flows called in the block show their progress."""
    token = _style.set(style)
    try:
        yield
    finally:
        _style.reset(token)


@contextmanager
def reporting(plan: Plan, todo: Todo) -> Iterator[None]:
    """Show the progress of the shards in `todo` while the block runs."""
    style = _style.get()
    if style == "none":
        yield
        return
    stages = {
        name: _Stage(name, _bytes(shards), len(shards))
        for name, shards in _todo_by_stage(todo).items()
        if shards
    }
    done = len(plan.shards) - len(todo.infer or todo.tokenize)
    console = Console(stderr=True)
    if style == "terminal" and console.is_terminal:
        with _Bars(console, stages) as bars, reporting_to(bars):
            yield
    else:
        lines = _Lines(stages)
        lines.say(f"{counted(len(plan.shards), 'shard')}, {done} done before")
        with reporting_to(lines):
            yield
        lines.finish()


def _todo_by_stage(todo: Todo) -> dict[str, tuple[Shard, ...]]:
    return {"tokenize": todo.tokenize, "infer": todo.infer}


def _bytes(shards: tuple[Shard, ...]) -> int:
    return sum(shard.text_bytes for shard in shards)


@dataclass(slots=True)
class _Stage:
    """Running sums of one stage."""

    name: str
    text_bytes: int
    num_shards: int
    rows: int = 0
    tokens: int = 0
    shards_done: int = 0
    first_s: float | None = None
    seconds: float = 0.0

    def advance(self, rows: int, tokens: int) -> None:
        now = time.perf_counter()
        self.first_s = self.first_s or now
        self.rows += rows
        self.tokens += tokens
        self.seconds = now - self.first_s

    def describe(self) -> str:
        rate = f", {self.tokens / self.seconds:,.0f} tok/s" if self.seconds else ""
        return f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}{rate}"

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, from the shards done so far."""
        if not self.shards_done or not self.seconds:
            return None
        return self.seconds * (self.num_shards - self.shards_done) / self.shards_done


@dataclass(slots=True)
class _Lines(Reporter):
    """A line every few seconds and one at the end, to the run's logger or to stderr."""

    stages: dict[str, _Stage]
    lock: threading.Lock = field(default_factory=threading.Lock)
    last_s: float = field(default_factory=time.monotonic)

    def advance(self, stage: str, rows: int, tokens: int) -> None:
        with self.lock:
            self.stages[stage].advance(rows, tokens)
            now = time.monotonic()
            if now - self.last_s < LINE_EVERY_S:
                return
            self.last_s = now
            line = self._line()
        self.say(line)

    def shard_done(self, stage: str) -> None:
        with self.lock:
            self.stages[stage].shards_done += 1

    def finish(self) -> None:
        self.say(self._line())

    def _line(self) -> str:
        return "; ".join(_stage_line(stage) for stage in self.stages.values())

    def say(self, line: str) -> None:
        if _style.get() == "terminal":
            print(line, file=sys.stderr, flush=True)  # noqa: T201 (the plain form of a progress bar)
            return
        try:
            get_run_logger().info(line)
        except MissingContextError:
            logging.getLogger("tokenmill").info(line)


def _stage_line(stage: _Stage) -> str:
    left = f", about {stage.left_s:,.0f} s left" if stage.left_s else ""
    return f"{stage.name}: shard {stage.shards_done}/{stage.num_shards}, {stage.describe()}{left}"


class _Bars(Reporter):
    """Two bars, one a stage."""

    def __init__(self, console: Console, stages: dict[str, _Stage]) -> None:
        self._stages, self._lock = stages, threading.Lock()
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("shards  {task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        for name, stage in self._stages.items():
            self._bars[name] = self._progress.add_task(name, total=stage.num_shards, figures="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, stage: str, rows: int, tokens: int) -> None:
        with self._lock:
            self._stages[stage].advance(rows, tokens)
            self._progress.update(self._bars[stage], figures=self._stages[stage].describe())

    def shard_done(self, stage: str) -> None:
        with self._lock:
            self._stages[stage].shards_done += 1
            self._progress.advance(self._bars[stage])
