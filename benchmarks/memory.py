"""Peak memory of the engine at one and at four times the corpus: the same if nothing piles up.

python -m benchmarks.memory JOB_FILE        (a child: runs the job, tells its peak)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import answering, load_job, peak_memory_bytes, save_job, say, started
from benchmarks.corpus import Corpora, bench_job


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak memory in bytes of a process that runs a whole job."""

    once_bytes: int
    once_tokens: int
    four_times_bytes: int
    four_times_tokens: int

    @property
    def growth(self) -> float:
        return self.four_times_bytes / self.once_bytes


def measure(corpora: Corpora, folder: Path) -> Memory:
    """Run the job over each corpus, in a process of its own."""
    answers = []
    for name, corpus in (("once", corpora.once), ("four-times", corpora.four_times)):
        job_file = save_job(bench_job(name, corpus, folder / f"out-{name}"), folder / f"{name}.json")
        with started(folder / f"{name}.log", "benchmarks.memory", job_file) as child:
            answers.append(child.ready)
        print(f"  {name:<12} {answers[-1]['peak_memory_bytes'] / 2**20:7.0f} MiB", flush=True)
    once, four_times = answers
    return Memory(
        once_bytes=once["peak_memory_bytes"],
        once_tokens=once["tokens"],
        four_times_bytes=four_times["peak_memory_bytes"],
        four_times_tokens=four_times["tokens"],
    )


def main(arguments: Sequence[str]) -> None:
    with answering() as answers:
        from tokenmill.engine import run_job

        manifest = run_job(load_job(arguments[0]))
        say(answers, peak_memory_bytes=peak_memory_bytes(), tokens=manifest.counts.tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
