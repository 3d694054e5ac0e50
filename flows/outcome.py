"""How a flow ends: Completed, CompletedWithRejects or (by an exception) Failed, and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed

from tasks.artifacts import log_summary, log_throughput
from tokenmill.accounting import per_second
from tokenmill.engine import Run
from tokenmill.job import Job
from tokenmill.limits import check_limits
from tokenmill.manifest import read_manifest
from tokenmill.plan import Plan
from tokenmill.quantities import counted

Summary = dict[str, Any]


def nothing_to_do(run: Run, plan: Plan, announce: bool = True) -> State[Summary]:
    """Every shard is done and published: say so, and leave the dataset as it is.

    announce: whether there is a server to send events to.  Raises RejectLimitError, QualityError.
    """
    manifest = read_manifest(run.store)
    assert manifest is not None  # is_published() has seen it
    check_limits(manifest.counts, run.job.quality)
    message = f"Nothing to do: {counted(len(plan.shards), 'shard')} done and published in {run.store.uri}"
    summary = {"nothing_to_do": True, "message": message, "output": run.store.uri}
    return _completed(run.job.name, manifest.counts.rows_rejected if announce else 0, message, summary)


def stage_state(run: Run, plan: Plan, stage: str, figures: Sequence[Mapping[str, Any]]) -> State[Summary]:
    """The end of a flow that runs one stage."""
    summary = {**roll_up(figures, stage), "shards": len(plan.shards), "output": run.store.uri}
    if figures:
        log_throughput([summary], f"roll-up of {stage}, job {run.job.name}")
    did = f"{counted(len(figures), 'shard')} done now, {len(plan.shards) - len(figures)} before"
    return _completed(run.job.name, int(summary["rejects"]), f"{stage}: {did}", summary)


def final_state(
    job: Job, summary: Mapping[str, Any], published: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]
) -> State[Summary]:
    """The end of a flow that publishes."""
    rows = [
        roll_up(figures, stage)
        for stage in ("tokenize", "infer")
        if any(f["stage"] == stage for f in figures)
    ]
    log_throughput([*rows, published], f"roll-up of job {job.name}")
    log_summary(_markdown(job, summary))
    message = f"{counted(published['rows'], 'row')} published, {published['rejects']:,} rejected"
    return _completed(job.name, int(published["rejects"]), message, dict(summary))


def _completed(name: str, num_rejects: int, message: str, summary: Summary) -> State[Summary]:
    if not num_rejects:
        return Completed(message=message, data=summary)
    # Subtle: CompletedWithRejects is of type COMPLETED, so automations on Failed miss it.
    emit_event(
        event="tokenmill.job.completed-with-rejects",
        resource={"prefect.resource.id": f"tokenmill.job.{name}"},
        payload={"rejects": num_rejects},
    )
    return Completed(name="CompletedWithRejects", message=message, data=summary)


def roll_up(figures: Sequence[Mapping[str, Any]], stage: str) -> dict[str, Any]:
    """One row for all shards of a stage: sums, and rates from the sums."""
    mine = [f for f in figures if f["stage"] == stage]
    tokens, new, seconds = (sum(f[name] for f in mine) for name in ("tokens", "tokens_generated", "seconds"))
    weighted = sum(f["effective_token_ratio"] * f["tokens"] for f in mine)
    return {
        "stage": stage,
        "rows": sum(f["rows"] for f in mine),
        "rejects": sum(f["rejects"] for f in mine),
        "tokens": tokens,
        "tokens_generated": new,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(per_second(tokens + new, seconds), 1),
        "effective_token_ratio": round(weighted / tokens, 4) if tokens else 1.0,
        "idle_share": round(_mean([f["idle_share"] for f in mine]), 4),
        "batch_latency_p95_ms": max((f["batch_latency_p95_ms"] for f in mine), default=0.0),
        "peak_memory_mb": max((f["peak_memory_mb"] for f in mine), default=0.0),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _markdown(job: Job, summary: Mapping[str, Any]) -> str:
    counts = summary["counts"]
    lines = [f"| {name} | {value} |" for name, value in counts.items() if not isinstance(value, dict)]
    head = [
        f"# {job.name}",
        "",
        f"Published in `{job.output.uri}`.",
        "",
        "| count | value |",
        "| --- | --- |",
    ]
    return "\n".join([*head, *lines])
