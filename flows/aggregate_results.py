"""Stages three and four alone: finished shards become a published dataset and a report."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.outcome import final_state
from flows.shard_runs import bounded_runner
from tasks.dataset_tasks import gate_results, gate_tokens, publish, write_report
from tasks.runs import job_data, open_run
from tokenmill.job import Job


@flow(
    name="aggregate-results", flow_run_name="{job.name}", task_runner=bounded_runner(), persist_result=False
)
def aggregate_results(job: Job) -> State[dict[str, Any]]:
    """Balance the account, compact, group, publish and report.

    Args:
        job: What to do. See the README, "The job file".
    """
    start = time.perf_counter()
    run = open_run(job)
    run.setup.need_model()
    plan = run.claimed_plan()
    run.claim(plan)
    data, plan_id = job_data(job), run.plan_id(plan)
    checked = [gate_tokens(data, plan_id), gate_results(data, plan_id)] if job.run.gates else None
    published = publish(data, plan_id)
    summary = write_report(data, plan_id, checked, None, None, time.perf_counter() - start)
    return final_state(job, summary, published, [])
