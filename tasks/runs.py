"""From a task's plain parameters back to the engine's objects, in whatever process it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blocks.resolve import inline_settings, resolve
from tokenmill.engine import Run
from tokenmill.job import Job

JobData = Mapping[str, Any]


def job_data(job: Job) -> JobData:
    """A job as plain values: what tasks take. Storage blocks stay names; secrets stay in blocks."""
    return inline_settings(job).model_dump(mode="json")


def open_run(job: Job | JobData) -> Run:
    """Settle a job, its blocks loaded.  Raises ConfigError's leaves."""
    settled, storages = resolve(job if isinstance(job, Job) else Job.model_validate(job))
    return Run.open(settled, storages)
