"""Real runs in processes of their own, killed on purpose: a client of `crash_server`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.job import Job

ROOT = Path(__file__).parents[2]
KILLED = -9


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended. status: exit code, or KILLED.  told: its error, if it had one."""

    status: int
    steps: list[str]
    told: str


class CrashServer:
    """Runs jobs one after the other, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: Job, **order: Any) -> Ended:
        """order: step and when ("before", "after"), kill_after_s, clock ("back")."""
        return Ended(**self._ask({"job": job.model_dump(mode="json"), **order}))

    def warm(self, job: Job) -> None:
        self._ask({"job": job.model_dump(mode="json"), "warm": True})

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the crash server is gone; its errors are above"
        found: dict[str, Any] = json.loads(answer)
        return found


@contextmanager
def crash_server() -> Iterator[CrashServer]:
    """A server for as long as the block lasts."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("crash_server.py")), "--no-fsync"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield CrashServer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
