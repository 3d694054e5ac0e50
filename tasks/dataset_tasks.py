"""Tasks over the whole dataset: the two gates, and publication."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prefect import task

from tasks.artifacts import log_throughput
from tasks.retries import TRANSIENT_RETRIES
from tasks.runs import JobData, open_run
from tokenmill.accounting import per_second
from tokenmill.engine import Run
from tokenmill.manifest import read_manifest
from tokenmill.plan import Shard
from tokenmill.receipts import peak_memory_bytes, read_receipts

if TYPE_CHECKING:
    from tokenmill.gates import GateResult


@task(name="check-model", **TRANSIENT_RETRIES)
def check_model(job: JobData, shards: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The model loads and runs a row here, before anything is written.

    shards: a sample of those to be done.  Returns how int8 agrees with float32 on their rows.
    """
    found = open_run(job).check_model([Shard.from_json(shard) for shard in shards])
    return found.to_json() if found else None


@task(name="gate-tokens", **TRANSIENT_RETRIES)
def gate_tokens(job: JobData, plan_id: str) -> dict[str, Any]:
    """The token dataset is what it says it is. A critical failure fails the run."""
    from tokenmill.gates import check_tokens

    run = open_run(job)
    plan = run.claimed_plan(plan_id)
    receipts = read_receipts(run.store, "tokenize", plan.keys_of("tokenize"))
    limit = run.job.quality.max_unknown_rate
    return _judged(run, check_tokens(plan, run.setup.tokenize, run.store, receipts, max_unknown_rate=limit))


@task(name="gate-results", **TRANSIENT_RETRIES)
def gate_results(job: JobData, plan_id: str) -> dict[str, Any]:
    """Every row has one finite result. A critical failure fails the run."""
    from tokenmill.gates import check_results

    run = open_run(job)
    plan = run.claimed_plan(plan_id)
    receipts = read_receipts(run.store, "infer", plan.keys_of("infer"))
    return _judged(run, check_results(plan, run.setup, run.store, receipts))


def _judged(run: Run, result: GateResult) -> dict[str, Any]:
    """Its Data Docs are written whatever it found.  Raises QualityError."""
    from tokenmill.gates import raise_if_critical, write_data_docs

    write_data_docs(run.store, [result])
    raise_if_critical(result)
    return result.to_json()


@task(name="publish", **TRANSIENT_RETRIES)
def publish(job: JobData, plan_id: str) -> dict[str, Any]:
    """Finished shards become a published dataset with a manifest. Returns its sums."""
    start = time.perf_counter()
    run = open_run(job)
    plan = run.claimed_plan(plan_id)
    manifest = run.publish(plan, run.collect(plan))
    seconds = time.perf_counter() - start
    figures = {
        "stage": "aggregate",
        "rows": manifest.counts.rows_out,
        "tokens": manifest.counts.tokens,
        "tokens_generated": manifest.counts.tokens_generated,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(per_second(manifest.counts.tokens_through, seconds), 1),
        "effective_token_ratio": round(manifest.counts.effective_token_ratio, 4),
        "peak_memory_mb": round(peak_memory_bytes() / 2**20, 1),
    }
    log_throughput([figures], f"publication of job {manifest.job}")
    return {**figures, "parts": len(manifest.results), "rejects": manifest.counts.rows_rejected}


@task(name="write-report", **TRANSIENT_RETRIES)
def write_report(
    job: JobData,
    plan_id: str,
    gates: list[dict[str, Any]] | None,
    skipped: dict[str, int] | None,
    agreement: dict[str, Any] | None,
    seconds: float,
) -> dict[str, Any]:
    """The report is written beside the dataset. Returns its summary, without the list of shards."""
    from tokenmill import report

    run = open_run(job)
    finished = run.collect(run.claimed_plan(plan_id))
    data = report.report_data(
        run.job,
        finished,
        read_manifest(run.store),
        gates=gates,
        skipped=skipped,
        agreement=agreement,
        wall_seconds=round(seconds, 3),
    )
    return report.summary(report.write_report(run.store, data))
