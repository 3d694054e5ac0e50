"""The figures of a report, worked out from receipts: plain, finite values. Pure, no I/O.

ShardReceipts   what there is of one shard
job_figures     rows and tokens of the finished shards, balanced
stage_figures   work, rates and seconds of one stage
shard_figures   the same of one shard, short
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tokenmill.accounting import Counts, Histogram, per_second
from tokenmill.quantities import percent, significant
from tokenmill.receipts import Receipt
from tokenmill.stages.aggregate import job_counts

ACTIVITIES: Mapping[str, str] = {
    "read": "waiting for rows",
    "compute": "computing",
    "pack": "packing tokens into columns",
    "write": "waiting for the writer",
    "other": "work between the measured steps",
}
BUSY = 0.9  # a stage that computes for this share of its time is held back by nothing else
TIGHT = 0.9  # an effective-token ratio below this is worth a word


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReceipts:
    """One shard of the plan: its receipts, None where a stage has not finished it."""

    tokenize: Receipt | None
    infer: Receipt | None


def job_figures(shards: Sequence[ShardReceipts], has_model: bool) -> dict[str, Any]:
    """Counts and rates of the shards that went through every stage of the job.

    Raises AccountingError unless rows in == rows out + rejects.
    """
    done = done_shards(shards, has_model)
    before = [shard.tokenize for shard in done if shard.tokenize]
    after = [shard.infer for shard in done if shard.infer]
    counts = job_counts(before, after) if has_model else Counts.total(r.counts for r in before)
    counts.check("job")
    rates = {"rejected": counts.reject_rate, "unknown": counts.unknown_rate}
    return {
        "counts": {**counts.to_json(), "rows_rejected": counts.rows_rejected},
        "rates": {name: significant(rate) for name, rate in rates.items()},
    }


def done_shards(shards: Iterable[ShardReceipts], has_model: bool) -> list[ShardReceipts]:
    """The shards that need no more work."""
    return [s for s in shards if s.tokenize and (s.infer or not has_model)]


def stage_figures(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Sums over shards, and rates from the sums. Seconds are those of all workers together."""
    counts = Counts.total(receipt.counts for receipt in receipts)
    seconds = divided_seconds(receipts)
    wall = sum(seconds.values())
    return {
        "shards": len(receipts),
        "rows_in": counts.rows_in,
        "rows_out": counts.rows_out,
        "rows_rejected": counts.rows_rejected,
        "tokens": counts.tokens,
        "tokens_generated": counts.tokens_generated,
        "tokens_computed": counts.tokens_computed,
        "batches": counts.batches,
        "out_of_memory": counts.out_of_memory,
        "rows_recomputed": counts.rows_recomputed,
        "seconds": significant(wall),
        "seconds_by_activity": {name: significant(value) for name, value in seconds.items()},
        "tokens_per_second": significant(per_second(counts.tokens_through, wall)),
        "effective_token_ratio": _ratio(counts),
        "idle_share": significant(_idle_share(seconds)),
        "batch_latency_s": distribution(merged(r.latency_s for r in receipts), (0.5, 0.95)),
        "peak_memory_bytes": max((r.peak_memory_bytes for r in receipts), default=0),
        "peak_device_memory_bytes": max((r.peak_device_memory_bytes for r in receipts), default=0),
        "held_back_by": held_back_by(seconds, _ratio(counts)),
    }


def divided_seconds(receipts: Iterable[Receipt]) -> dict[str, float]:
    """Seconds by activity, summed; "other" is what no activity accounts for."""
    sums: Counter[str] = Counter()
    for receipt in receipts:
        sums.update(receipt.seconds)
    wall = sums.pop("wall", 0.0)
    known = {name: sums[name] for name in ACTIVITIES if name in sums}
    rest = {name: value for name, value in sums.items() if name not in ACTIVITIES}
    return {**known, **rest, "other": max(0.0, wall - sum(sums.values()))}


def _ratio(counts: Counts) -> float | None:
    return significant(counts.effective_token_ratio) if counts.tokens_padded else None


def _idle_share(seconds: Mapping[str, float]) -> float:
    wall = sum(seconds.values())
    return max(0.0, 1 - seconds.get("compute", 0.0) / wall) if wall > 0 else 0.0


def held_back_by(seconds: Mapping[str, float], ratio: float | None) -> str:
    """One sentence: where to look first if the stage should be faster; empty if it did nothing.

    Example: {"read": 3, "compute": 1} -> "Computing took 25 % of the time; next ..., 75 %."
    """
    wall = sum(seconds.values())
    if wall <= 0:
        return ""
    busy = seconds.get("compute", 0.0) / wall
    computing = f"Computing took {percent(busy)} of the time"
    if busy >= BUSY:
        wasted = ratio is not None and ratio < TIGHT
        return (
            f"{computing}; {percent(1 - (ratio or 0))} of what was computed is padding."
            if wasted
            else f"{computing}."
        )
    worst = max((name for name in seconds if name != "compute"), key=lambda name: seconds[name])
    return f"{computing}; next comes {ACTIVITIES.get(worst, worst)}, {percent(seconds[worst] / wall)}."


def merged(histograms: Iterable[Histogram]) -> Histogram:
    return reduce(Histogram.merge, histograms, Histogram())


def distribution(
    histogram: Histogram, shares: Sequence[float], most: float | None = None
) -> dict[str, Any] | None:
    """Quantiles, and (low, high, count) of each bucket; None for an empty histogram.

    most: the largest value possible, if known: buckets are wide, and none may seem to exceed it.
    """
    if not histogram.total:
        return None
    limit = most if most is not None else float("inf")
    quantiles = {f"p{100 * share:g}": significant(min(histogram.quantile(share), limit)) for share in shares}
    bars = [[significant(low), significant(high), n] for low, high, n in histogram.bars()]
    return {"total": histogram.total, **quantiles, "bars": bars}


def length_figures(receipts: Iterable[Receipt], max_tokens: int | None) -> dict[str, Any] | None:
    """Tokens a row: quantiles and buckets; None where nothing was tokenized."""
    lengths = merged(receipt.lengths for receipt in receipts)
    figures = distribution(lengths, (0.5, 0.9, 0.99, 1.0), max_tokens)
    return {**figures, "max_tokens": max_tokens} if figures else None


def shard_figures(number: int, shard: ShardReceipts) -> dict[str, Any]:
    """One line of the table of shards; None in place of a stage that is not done."""
    before, after = shard.tokenize, shard.infer
    rejected = sum(receipt.counts.rows_rejected for receipt in (before, after) if receipt)
    return {
        "shard": number,
        "rows_in": before.counts.rows_in if before else None,
        "rows_out": after.counts.rows_out if after else None,
        "rows_rejected": rejected,
        "tokens": before.counts.tokens if before else None,
        "tokenize": _short(before),
        "infer": _short(after),
    }


def _short(receipt: Receipt | None) -> dict[str, Any] | None:
    if receipt is None:
        return None
    wall = receipt.seconds.get("wall", 0.0)
    return {
        "seconds": significant(wall),
        "tokens_per_second": significant(per_second(receipt.counts.tokens_through, wall)),
        "effective_token_ratio": _ratio(receipt.counts),
        "idle_share": significant(_idle_share(divided_seconds([receipt]))),
        "batch_latency_p95_s": significant(receipt.latency_s.quantile(0.95)),
        "peak_memory_bytes": receipt.peak_memory_bytes,
        "out_of_memory": receipt.counts.out_of_memory,
        "max_batch_tokens": receipt.max_batch_tokens,
    }
