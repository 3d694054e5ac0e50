"""Stage one alone: a corpus becomes a token dataset. Needs no model, only a tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.outcome import stage_state
from flows.progress_lines import reporting
from flows.shard_runs import bounded_runner, run_shards
from tasks.dataset_tasks import gate_tokens
from tasks.runs import job_data, open_run
from tokenmill.job import Job


@flow(name="tokenize-corpus", flow_run_name="{job.name}", task_runner=bounded_runner(), persist_result=False)
def tokenize_corpus(job: Job) -> State[dict[str, Any]]:
    """Tokenize what is not tokenized yet, and check the token dataset.

    Args:
        job: What to do. See the README, "The job file".
    """
    run = open_run(job)
    plan = run.plan()
    todo = replace(run.todo(plan), infer=())
    run.claim(plan)
    data = job_data(job)
    with reporting(plan, todo):
        outcome = run_shards(run, plan, data, todo)
    outcome.raise_first(len(plan.shards))
    if job.run.gates:
        gate_tokens(data, run.plan_id(plan))
    return stage_state(run, plan, "tokenize", outcome.figures)
