"""Stage two alone: token parts that are there become result parts."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.outcome import stage_state
from flows.progress_lines import reporting
from flows.shard_runs import bounded_runner, run_shards
from tasks.dataset_tasks import check_model, gate_results
from tasks.runs import job_data, open_run
from tokenmill.errors import ConfigError
from tokenmill.job import Job
from tokenmill.plan import Todo
from tokenmill.quantities import counted
from tokenmill.sample import sample_shards


@flow(name="run-inference", flow_run_name="{job.name}", task_runner=bounded_runner(), persist_result=False)
def run_inference(job: Job) -> State[dict[str, Any]]:
    """Run the model over tokenized shards that have no results yet, and check the results.

    Reads no corpus: it works where only the output is reachable.

    Args:
        job: What to do. See the README, "The job file".
    """
    run = open_run(job)
    run.setup.need_model()
    plan = run.claimed_plan()
    todo = run.todo(plan)
    unready = {shard.index for shard in todo.tokenize}
    ready = tuple(shard for shard in todo.infer if shard.index not in unready)
    if unready and not ready:
        raise ConfigError(
            f"{run.store.uri}: {counted(len(unready), 'shard')} not tokenized; run `tokenmill tokenize` first"
        )
    data = job_data(job)
    if ready:
        check_model(data, [shard.to_json() for shard in sample_shards(ready)])
    run.claim(plan)
    with reporting(plan, Todo(tokenize=(), infer=ready)):
        outcome = run_shards(run, plan, data, Todo(tokenize=(), infer=ready))
    outcome.raise_first(len(plan.shards))
    if job.run.gates and len(ready) == len(todo.infer):
        gate_results(data, run.plan_id(plan))
    return stage_state(run, plan, "infer", outcome.figures)
