"""A process that runs one contender on demand: a shard's number comes in, seconds go out.

Contenders live in processes of their own, so that none profits from another's settings. A child
that waits does nothing.

    python -m benchmarks.child CONTENDER JOB_FILE VECTORS_FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from tokenmill.errors import TokenmillError
from tokenmill.job import Job

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "GX_ANALYTICS_ENABLED": "false",
}


class Child:
    """The parent's end of a child process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    @cached_property
    def ready(self) -> dict[str, Any]:
        """The child's first answer, waited for if need be."""
        return self._answer()

    def ask(self, question: str) -> dict[str, Any]:
        """Send one line to a child that is ready; its answer."""
        assert self.ready
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["no message"]
            raise TokenmillError(f"a child of the benchmark ended: {lines[-1]}; see {self._log}")
        return json.loads(line)  # type: ignore[no-any-return]


@contextmanager
def started(log: Path, module: str, *arguments: str) -> Iterator[Child]:
    """A child `python -m module arguments`; ended with the block. log: its standard error."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PREFECT_HOME": str(log.parent / "prefect")},
        )
    try:
        yield Child(process, log)
    finally:
        process.communicate()  # closes its input, which ends it


@contextmanager
def answering() -> Iterator[IO[str]]:
    """The child's end: a stream for answers. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        yield answers


def say(answers: IO[str], **values: Any) -> None:
    print(json.dumps(values), file=answers, flush=True)


def save_job(job: Job, path: Path) -> str:
    """Write a job for a child to read; the file's name."""
    path.write_text(job.model_dump_json())
    return str(path)


def load_job(path: str) -> Job:
    return Job.model_validate_json(Path(path).read_text())


def peak_memory_bytes() -> int:
    """Most memory of this process since it began; not that of the one it was forked from."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    from tokenmill.receipts import peak_memory_bytes as by_getrusage

    return by_getrusage()


def main(arguments: Sequence[str]) -> None:
    name, job_file, vectors = arguments
    with answering() as answers:
        import numpy as np
        import torch

        from benchmarks.contenders import CONTENDERS
        from tokenmill.engine import Run

        run = Run.open(load_job(job_file))
        shards = run.plan().shards
        prepare = CONTENDERS[name](run)
        prepare(shards[-1])()  # warm
        say(answers, threads=torch.get_num_threads(), cuda=torch.cuda.is_available())
        for line in sys.stdin:
            work = prepare(shards[int(line)])
            start = time.perf_counter()
            vectors_of = work()
            seconds = time.perf_counter() - start
            np.save(Path(vectors) / f"{name}-{int(line)}.npy", vectors_of())
            say(answers, seconds=seconds, peak_memory_bytes=peak_memory_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
