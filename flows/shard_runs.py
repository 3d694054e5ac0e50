"""Submitting shards as task runs: tokenize ahead, infer as soon as tokens are there.

Shared by the flows. Receipts decide what is done; Prefect shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from tasks.artifacts import ProgressArtifact
from tasks.runs import JobData
from tasks.shard_tasks import infer_shard, tokenize_shard
from tokenmill.engine import Run
from tokenmill.errors import TokenmillError
from tokenmill.plan import Plan, Shard, Todo
from tokenmill.receipts import Stage
from tokenmill.schedule import pipelined

Figures = dict[str, Any]

MAX_THREADS = 256 + 64 + 1  # the most that run.workers allows, more GPUs than a machine has, and the gate


def bounded_runner() -> TaskRunner[Any]:
    """Threads for one flow. `pipelined` keeps fewer than this in use."""
    return ThreadPoolTaskRunner(max_workers=MAX_THREADS)


@dataclass(slots=True)
class Outcome:
    """What came of the shards: throughput figures of those that ended well, errors of the rest."""

    figures: list[Figures] = field(default_factory=list)
    errors: list[tuple[str, BaseException]] = field(default_factory=list)

    def raise_first(self, num_shards: int) -> None:
        """Raises the first error, with how many shards failed and that the rest are kept."""
        if not self.errors:
            return
        name, error = self.errors[0]
        if len(self.errors) == 1 and num_shards == 1:
            raise error
        message = (
            f"{len(self.errors)} of {num_shards} shards failed, the first is {name}: {_told(error)}; "
            "the others are kept, run again to finish"
        )
        kind = type(error) if isinstance(error, TokenmillError) else TokenmillError
        raise kind(message) from error


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, TokenmillError) else f"unexpected {type(error).__name__}: {error}"


def run_shards(
    run: Run, plan: Plan, job: JobData, todo: Todo, on_tokenized: Callable[[], None] = lambda: None
) -> Outcome:
    """Run what is left of both stages as task runs. Shards that fail do not stop the others.

    on_tokenized: called once, when every shard is tokenized.  Raises RejectLimitError, QualityError.
    """
    progress = ProgressArtifact(f"shards of job {run.job.name}")
    outcome, total = Outcome(), len(todo.tokenize) + len(todo.infer)
    to_tokenize = len(todo.tokenize)
    if not to_tokenize:
        on_tokenized()
    tasks = {"tokenize": tokenize_shard, "infer": infer_shard}

    def submit(stage: Stage, shard: Shard) -> PrefectFuture[Figures]:
        return tasks[stage].submit(job, shard.to_json())

    for number, finished in enumerate(
        pipelined(
            tokenize=todo.tokenize,
            infer=todo.infer,
            submit=submit,
            succeeded=lambda future: _state(future).is_completed(),
            tokenize_slots=run.job.run.workers,
            infer_slots=run.infer_slots() if todo.infer else 1,
            before_infer=run.before_infer(plan),
        )
    ):
        _note(outcome, f"{finished.stage}-{finished.shard.index}", _state(finished.future))
        progress.update((number + 1) / total)
        to_tokenize -= finished.stage == "tokenize"
        if finished.stage == "tokenize" and to_tokenize == 0 and not outcome.errors:
            on_tokenized()
    return outcome


def _state(future: PrefectFuture[Figures]) -> State[Figures]:
    future.wait()
    return future.state


def _note(outcome: Outcome, name: str, state: State[Figures]) -> None:
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        outcome.errors.append((name, result))
        get_run_logger().error("%s: %s", name, result)
    else:
        outcome.figures.append(result)
