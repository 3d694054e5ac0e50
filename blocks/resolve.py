"""Placeholder until blocks land."""

from tokenmill.engine import Storages
from tokenmill.job import Job


def resolve(job: Job) -> tuple[Job, Storages]:
    return job, Storages.of(job)
