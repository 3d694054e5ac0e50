"""Artifacts, best effort: a server that is slow or down never stops the data.

Each call gets a few seconds on a thread of its own. After one that fails, none is tried for a
while. Prefect blocks for over a minute when its server is gone; this is why.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

T = TypeVar("T")

TIME_LIMIT_S = 5.0
PAUSE_S = 60.0
MAX_TABLE_ROWS = 200
THROUGHPUT_KEY = "token-throughput"
PROGRESS_KEY = "tokenmill-progress"
SUMMARY_KEY = "tokenmill-summary"

_log = logging.getLogger(__name__)


class _Breaker:
    """Remembers that the server failed lately."""

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._until

    def trip(self) -> None:
        self._until = time.monotonic() + PAUSE_S


_breaker = _Breaker()


def best_effort(call: Callable[[], T]) -> T | None:
    """The call's value, or None if it failed, took too long, or others failed just before."""
    if _breaker.is_open:
        return None
    results: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            results.append(call())
        except Exception as exc:  # noqa: BLE001 - whatever the server or client does, the data goes on
            errors.append(exc)

    thread = threading.Thread(
        target=copy_context().run, args=(attempt,), daemon=True, name="tokenmill-artifact"
    )
    thread.start()
    thread.join(TIME_LIMIT_S)
    if results:
        return results[0]
    _breaker.trip()
    why = f"{type(errors[0]).__name__}: {errors[0]}" if errors else f"no answer in {TIME_LIMIT_S:.0f} s"
    _log.warning("artifact not written (%s); trying again in %.0f s", why, PAUSE_S)
    return None


def _finite(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value


def log_throughput(rows: Sequence[Mapping[str, Any]], description: str) -> None:
    """One table under the stable key `token-throughput`: versions of it are a run's history."""
    table = [{name: _finite(value) for name, value in row.items()} for row in rows[:MAX_TABLE_ROWS]]
    best_effort(lambda: create_table_artifact(table, key=THROUGHPUT_KEY, description=description))


def log_summary(markdown: str) -> None:
    best_effort(lambda: create_markdown_artifact(markdown, key=SUMMARY_KEY))


class ProgressArtifact:
    """A progress bar in the Prefect UI, updated at most every few seconds."""

    def __init__(self, description: str, every_s: float = 5.0) -> None:
        self._id = best_effort(
            lambda: cast(UUID, create_progress_artifact(0.0, key=PROGRESS_KEY, description=description))
        )
        self._every_s, self._last = every_s, -math.inf

    def update(self, share: float) -> None:
        """share: done, 0 to 1."""
        now = time.monotonic()
        if self._id is None or (share < 1 and now - self._last < self._every_s):
            return
        self._last = now
        artifact_id = self._id
        best_effort(lambda: update_progress_artifact(artifact_id, 100 * share))
