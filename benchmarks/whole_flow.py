"""One job under Prefect beside the same job by the engine alone, in one process, in turns.

What is fixed (imports, the server, what each flow run costs whatever its size) is measured by a
job of a few rows and printed apart. The ratio is of what grows with the corpus.

    python -m benchmarks.whole_flow FOLDER CORPUS TINY_CORPUS     (a child)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.child import answering, say, started
from benchmarks.corpus import Corpora, bench_job
from tokenmill.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeFlow:
    """Seconds, by repetition. tiny_*: the same of a job of a few rows.

    startup_s: once in a process: imports, Prefect's server (server_s of it), first use of everything.
    """

    tokens: int
    startup_s: float
    server_s: float
    engine_s: tuple[float, ...]
    flow_s: tuple[float, ...]
    tiny_engine_s: tuple[float, ...]
    tiny_flow_s: tuple[float, ...]

    @property
    def fixed_s(self) -> float:
        """What a flow run costs beside the engine's, whatever its size."""
        return median(b - a for a, b in zip(self.tiny_engine_s, self.tiny_flow_s, strict=True))

    @property
    def ratio(self) -> float:
        """Flow over engine, the fixed costs left out."""
        pairs = zip(self.engine_s, self.flow_s, strict=True)
        return median((flow - self.fixed_s) / engine for engine, flow in pairs)


def measure(corpora: Corpora, repeats: int, folder: Path) -> WholeFlow:
    arguments = (str(folder), str(corpora.job), str(corpora.tiny))
    seconds: dict[str, list[float]] = {name: [] for name in ("engine", "flow", "tiny_engine", "tiny_flow")}
    with started(folder / "whole-flow.log", "benchmarks.whole_flow", *arguments) as child:
        for repeat in range(repeats):
            order = list(seconds) if repeat % 2 else list(seconds)[::-1]
            for name in order:
                answer = child.ask(name)
                seconds[name].append(answer["seconds"])
                print(f"  {name:<12} {answer['seconds']:7.2f} s", flush=True)
    return WholeFlow(
        tokens=corpora.job_tokens,
        startup_s=child.ready["startup_s"],
        server_s=child.ready["server_s"],
        **{f"{name}_s": tuple(values) for name, values in seconds.items()},
    )


def run_under_prefect(job: Job) -> None:
    """The whole flow, as `tokenmill run` calls it, on a server that is up. Raises what it raised."""
    from flows.launch import summary_of
    from flows.progress_lines import progress_style
    from flows.token_pipeline import token_pipeline

    with progress_style("none"):
        summary_of(token_pipeline(job, return_state=True))


def run_by_engine(job: Job) -> None:
    from tokenmill.engine import run_job

    run_job(job)


def main(arguments: Sequence[str]) -> None:
    folder, corpus, tiny = (Path(argument) for argument in arguments)
    runners: dict[str, tuple[Callable[[Job], None], Path]] = {
        "engine": (run_by_engine, corpus),
        "flow": (run_under_prefect, corpus),
        "tiny_engine": (run_by_engine, tiny),
        "tiny_flow": (run_under_prefect, tiny),
    }
    number = 0

    def timed(name: str) -> float:
        nonlocal number
        number += 1
        runner, texts = runners[name]
        start = time.perf_counter()
        runner(bench_job(name, texts, folder / f"out-{name}-{number}"))
        return time.perf_counter() - start

    with answering() as answers:
        timed("tiny_engine")
        start = time.perf_counter()
        from flows.server import prefect_server, quiet_environment

        quiet_environment(False)
        with prefect_server() as server_s:
            timed("tiny_flow")
            startup_s = time.perf_counter() - start - timed("tiny_engine")
            say(answers, startup_s=startup_s, server_s=server_s or 0.0)
            for line in sys.stdin:
                say(answers, seconds=timed(line.strip()))


if __name__ == "__main__":
    main(sys.argv[1:])
