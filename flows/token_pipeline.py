"""The main flow: corpus to published dataset, all four stages."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture

from flows.outcome import final_state, nothing_to_do
from flows.progress_lines import reporting
from flows.shard_runs import bounded_runner, run_shards
from tasks.dataset_tasks import check_model, gate_results, gate_tokens, publish, write_report
from tasks.runs import job_data, open_run
from tokenmill.job import Job
from tokenmill.sample import sample_shards


@flow(name="token-pipeline", flow_run_name="{job.name}", task_runner=bounded_runner(), persist_result=False)
def token_pipeline(job: Job) -> State[dict[str, Any]]:
    """Tokenize a corpus, run a model over it, check and publish the results.

    Run it again after any stop: only unfinished shards are done.

    Args:
        job: What to do. See the README, "The job file".
    """
    start = time.perf_counter()
    run = open_run(job)
    run.setup.need_model()
    plan = run.plan()
    todo = run.todo(plan)
    if not todo.infer and run.is_published(plan):
        return nothing_to_do(run, plan)
    data, plan_id = job_data(job), run.plan_id(plan)
    shards = [shard.to_json() for shard in sample_shards(todo.infer)]
    agreement = check_model(data, shards) if shards else None
    run.claim(plan)
    gates: list[PrefectFuture[dict[str, Any]]] = []

    def check_tokens() -> None:
        if job.run.gates:
            gates.append(gate_tokens.submit(data, plan_id))

    with reporting(plan, todo):
        outcome = run_shards(run, plan, data, todo, on_tokenized=check_tokens)
    outcome.raise_first(len(plan.shards))
    if job.run.gates:
        gates.append(gate_results.submit(data, plan_id))
    checked = [gate.result() for gate in gates]
    published = publish(data, plan_id)
    seconds = time.perf_counter() - start
    summary = write_report(data, plan_id, checked, dict(plan.skipped), agreement, seconds)
    return final_state(job, summary, published, outcome.figures)
