"""Receipts: what was done for one shard of one stage. A shard is done if and only if it has one.

Written after the part, in one step. Resume looks only at their names, in one listing.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenmill.accounting import Counts, Histogram, per_second
from tokenmill.errors import DataError
from tokenmill.parquet import FileInfo
from tokenmill.store import Store

RECEIPT_VERSION = 1
FOLDER = "receipts"

Stage = Literal["tokenize", "infer"]
PART_FOLDERS: Mapping[Stage, str] = {"tokenize": "tokens", "infer": "parts"}


def receipt_name(stage: Stage, key: str) -> str:
    return f"{FOLDER}/{stage}-{key}.json"


def part_name(stage: Stage, key: str) -> str:
    return f"{PART_FOLDERS[stage]}/{key}.parquet"


def rejects_name(stage: Stage, key: str) -> str:
    return f"rejects/{stage}-{key}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One shard's account. `seconds` holds wall, and how it divides by what was waited for."""

    stage: Stage
    key: str
    job: str
    shard: int
    part: FileInfo
    rejects: FileInfo | None
    counts: Counts
    seconds: Mapping[str, float]
    latency_s: Histogram = field(default_factory=Histogram)
    lengths: Histogram = field(default_factory=Histogram)
    max_batch_tokens: int | None = None
    peak_memory_bytes: int = 0
    peak_device_memory_bytes: int = 0
    backend: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return per_second(self.counts.tokens_through, self.seconds["wall"])

    @property
    def idle_share(self) -> float:
        """Share of the wall in which the stage's own engine did not compute, 0 to 1."""
        wall = self.seconds["wall"]
        return max(0.0, 1 - self.seconds.get("compute", 0.0) / wall) if wall > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "receipt_version": RECEIPT_VERSION,
            "stage": self.stage,
            "key": self.key,
            "job": self.job,
            "shard": self.shard,
            "part": self.part.to_json(),
            "rejects": self.rejects.to_json() if self.rejects else None,
            "counts": self.counts.to_json(),
            "seconds": dict(self.seconds),
            "latency_s": self.latency_s.to_json(),
            "lengths": self.lengths.to_json(),
            "max_batch_tokens": self.max_batch_tokens,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_device_memory_bytes": self.peak_device_memory_bytes,
            "backend": dict(self.backend),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Receipt:
        plain = {name: value for name, value in data.items() if name != "receipt_version"}
        return cls(
            **{
                **plain,
                "part": FileInfo(**data["part"]),
                "rejects": FileInfo(**data["rejects"]) if data["rejects"] else None,
                "counts": Counts.from_json(data["counts"]),
                "latency_s": Histogram.from_json(data["latency_s"]),
                "lengths": Histogram.from_json(data["lengths"]),
            }
        )

    def throughput(self) -> dict[str, Any]:
        """The figures that every task logs: plain, finite numbers."""
        return {
            "stage": self.stage,
            "shard": self.shard,
            "rows": self.counts.rows_in,
            "rejects": self.counts.rows_rejected,
            "tokens": self.counts.tokens,
            "tokens_generated": self.counts.tokens_generated,
            "seconds": round(self.seconds["wall"], 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "effective_token_ratio": round(self.counts.effective_token_ratio, 4),
            "idle_share": round(self.idle_share, 4),
            "batch_latency_p50_ms": round(self.latency_s.quantile(0.5) * 1000, 2),
            "batch_latency_p95_ms": round(self.latency_s.quantile(0.95) * 1000, 2),
            "peak_memory_mb": round(self.peak_memory_bytes / 2**20, 1),
            "peak_device_memory_mb": round(self.peak_device_memory_bytes / 2**20, 1),
        }


def write_receipt(store: Store, receipt: Receipt) -> None:
    """Makes the shard done. The part must be published already."""
    store.write_bytes(receipt_name(receipt.stage, receipt.key), encode_json(receipt.to_json()))


def read_receipts(store: Store, stage: Stage, keys: Iterable[str]) -> list[Receipt]:
    """Receipts in the order of their keys.  Raises DataError for one that cannot be parsed."""
    names = [receipt_name(stage, key) for key in keys]
    contents = store.read_many(names)
    return [_parse(f"{store.uri}/{name}", contents[name]) for name in names]


def _parse(what: str, data: bytes) -> Receipt:
    try:
        return Receipt.from_json(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(
            f"{what}: not a receipt that this version reads; delete it to redo the shard"
        ) from exc


def encode_json(value: Any) -> bytes:
    """Readable, stable JSON: sorted keys, no NaN.

    Subtle: a file name that is not UTF-8 holds lone surrogates; backslashreplace makes them JSON escapes.
    """
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode("utf-8", "backslashreplace")


def peak_memory_bytes() -> int:
    """Most memory this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
