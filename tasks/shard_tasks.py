"""One task run per shard and stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import task

from tasks.artifacts import log_throughput
from tasks.retries import TRANSIENT_RETRIES
from tasks.runs import JobData, open_run
from tokenmill.plan import Shard
from tokenmill.receipts import Receipt


@task(name="tokenize-shard", task_run_name="tokenize-{shard[index]}", **TRANSIENT_RETRIES)
def tokenize_shard(job: JobData, shard: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of one shard become token ids on disk. Returns the receipt's throughput figures."""
    return _logged(open_run(job).tokenize(Shard.from_json(shard)))


@task(name="infer-shard", task_run_name="infer-{shard[index]}", **TRANSIENT_RETRIES)
def infer_shard(job: JobData, shard: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of one shard become results on disk. Returns the receipt's throughput figures."""
    return _logged(open_run(job).infer(Shard.from_json(shard)))


def _logged(receipt: Receipt) -> dict[str, Any]:
    figures = receipt.throughput()
    log_throughput([figures], f"{receipt.stage} of shard {receipt.shard}, job {receipt.job}")
    return figures
