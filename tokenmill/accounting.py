"""Counts that must balance, histograms that add up, and the figures derived from them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tokenmill.errors import AccountingError

GROWTH = 1.1  # each bucket of a histogram is 10 % wider than the one before


@dataclass(slots=True)
class Histogram:
    """Counts of positive numbers in buckets of 10 % width: small, mergeable, within 5 %.

    Example: the median of [1.0, 2.0, 100.0] is reported between 1.9 and 2.1.
    """

    buckets: Counter[int] = field(default_factory=Counter)
    num_zeros: int = 0

    def add(self, value: float, times: int = 1) -> None:
        if value <= 0:
            self.num_zeros += times
        else:
            self.buckets[math.floor(math.log(value, GROWTH))] += times

    @property
    def total(self) -> int:
        return self.num_zeros + self.buckets.total()

    def quantile(self, share: float) -> float:
        """Smallest bucket's middle at or below which `share` of the values lie; 0.0 if empty."""
        left = share * self.total - self.num_zeros
        if left <= 0:
            return 0.0
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 1e-9:
                return float(GROWTH ** (bucket + 0.5))
        raise AssertionError("a histogram whose buckets do not sum to its total")

    def merge(self, other: Histogram) -> Histogram:
        return Histogram(self.buckets + other.buckets, self.num_zeros + other.num_zeros)

    def to_json(self) -> dict[str, Any]:
        counts = {str(bucket): n for bucket, n in sorted(self.buckets.items())}
        return {"growth": GROWTH, "zeros": self.num_zeros, "buckets": counts}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Histogram:
        buckets = Counter({int(bucket): n for bucket, n in data["buckets"].items()})
        return cls(buckets, data["zeros"])

    def bars(self) -> list[tuple[float, float, int]]:
        """(low, high, count) of each bucket that is not empty, in ascending order."""
        pairs = sorted(self.buckets.items())
        return [(GROWTH**bucket, GROWTH ** (bucket + 1), n) for bucket, n in pairs]


@dataclass(kw_only=True, slots=True)
class Counts:
    """What went in and what came of it, of one shard or of many. Rows and tokens are exact.

    chunks: rows of tokens, as many as rows out where no text is cut into several.
    rows_recomputed: distinct rows of tokens that low precision made NaN or infinite, done again in float32.
    tokens: of texts.  tokens_generated: new ones.  tokens_computed, tokens_padded: of what the model ran.
    """

    rows_in: int = 0
    rows_out: int = 0
    chunks: int = 0
    rows_truncated: int = 0
    rows_blank: int = 0
    rows_scrubbed: int = 0
    rows_with_removed: int = 0
    rows_with_unknown: int = 0
    rows_with_special: int = 0
    lines_blank: int = 0
    tokens: int = 0
    tokens_dropped: int = 0
    tokens_unknown: int = 0
    tokens_computed: int = 0
    tokens_padded: int = 0
    tokens_generated: int = 0
    chars_replaced: int = 0
    chars_removed: int = 0
    chars_unknown: int = 0
    batches: int = 0
    out_of_memory: int = 0
    rows_recomputed: int = 0
    rejects: Counter[str] = field(default_factory=Counter)

    @property
    def rows_rejected(self) -> int:
        return self.rejects.total()

    @property
    def tokens_through(self) -> int:
        """What throughput counts: the tokens of texts, and those that were generated."""
        return self.tokens + self.tokens_generated

    @property
    def effective_token_ratio(self) -> float:
        """Real tokens / padded tokens of what the device computed; 1.0 if it computed nothing."""
        return self.tokens_computed / self.tokens_padded if self.tokens_padded else 1.0

    @property
    def reject_rate(self) -> float:
        return self.rows_rejected / self.rows_in if self.rows_in else 0.0

    @property
    def unknown_rate(self) -> float:
        return self.tokens_unknown / self.tokens if self.tokens else 0.0

    def share_of_rows(self, num_rows: int) -> float:
        return num_rows / self.rows_in if self.rows_in else 0.0

    def check(self, what: str) -> None:
        """Raises AccountingError unless rows in == rows out + rejects."""
        if self.rows_in != self.rows_out + self.rows_rejected:
            raise AccountingError(
                f"{what}: {self.rows_in} rows in, but {self.rows_out} out and "
                f"{self.rows_rejected} rejected; this is a defect, nothing was published"
            )

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**plain, "rejects": dict(sorted(self.rejects.items()))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counts:
        return cls(**{**data, "rejects": Counter(data["rejects"])})

    @classmethod
    def total(cls, many: Iterable[Counts]) -> Counts:
        """Field by field sum."""
        result = cls()
        for counts in many:
            for f in fields(cls):
                setattr(result, f.name, getattr(result, f.name) + getattr(counts, f.name))
        return result


def per_second(amount: float, seconds: float) -> float:
    """Rate that is 0.0, not infinite, where no time passed: receipts and artifacts are JSON."""
    return amount / seconds if seconds > 0 else 0.0
