"""Telling someone how far a job is: the engine reports, whoever started it shows.

The reporter travels in a context variable, so that stages, threads and Prefect tasks need no
extra argument. Without one, reports go nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Reporter(Protocol):
    """Called from several threads; must be quick."""

    def advance(self, stage: str, rows: int, tokens: int) -> None:
        """`rows` more rows with `tokens` tokens went through a stage."""
        ...

    def shard_done(self, stage: str) -> None:
        """One more shard of a stage has its receipt."""
        ...


class _Silent:
    def advance(self, stage: str, rows: int, tokens: int) -> None:
        del stage, rows, tokens

    def shard_done(self, stage: str) -> None:
        del stage


_SILENT = _Silent()
_reporter: ContextVar[Reporter | None] = ContextVar("tokenmill_reporter", default=None)


def reporter() -> Reporter:
    """The reporter of this context."""
    return _reporter.get() or _SILENT


@contextmanager
def reporting_to(target: Reporter) -> Iterator[None]:
    """Send the reports of the block, and of threads that copy its context, to `target`."""
    token = _reporter.set(target)
    try:
        yield
    finally:
        _reporter.reset(token)
