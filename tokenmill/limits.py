"""Limits of a job's `quality` section: a count too high becomes a failure. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.accounting import Counts
from tokenmill.errors import QualityError, RejectLimitError
from tokenmill.job import QualitySpec


@dataclass(frozen=True, slots=True)
class _Limit:
    """An option of QualitySpec, and what it limits: how many of how many."""

    option: str
    what: str
    part: Callable[[Counts], int]
    whole: Callable[[Counts], int]


def _rows(counts: Counts) -> int:
    return counts.rows_in


LIMITS = (
    _Limit("max_unknown_rate", "tokens are unknown", lambda c: c.tokens_unknown, lambda c: c.tokens),
    _Limit("max_truncated_rate", "rows truncated", lambda c: c.rows_truncated, _rows),
    _Limit("max_blank_rate", "rows are blank", lambda c: c.rows_blank, _rows),
    _Limit("max_replaced_rate", "rows have characters replaced by U+FFFD", lambda c: c.rows_scrubbed, _rows),
    _Limit(
        "max_removed_rate",
        "rows have characters that the normaliser removes",
        lambda c: c.rows_with_removed,
        _rows,
    ),
)


def check_limits(counts: Counts, quality: QualitySpec) -> None:
    """Raises RejectLimitError for too many rejects, and QualityError for any other count over its limit.

    Example: 3 of 10 rows truncated, max_truncated_rate 0.2 -> QualityError
    """
    if counts.reject_rate > quality.max_reject_rate:
        reasons = ", ".join(f"{reason} {n}" for reason, n in counts.rejects.most_common())
        raise RejectLimitError(
            f"{counts.rows_rejected} of {counts.rows_in} rows rejected "
            f"({counts.reject_rate:.2%}: {reasons}), "
            f"quality.max_reject_rate is {quality.max_reject_rate:.2%}; not published. See rejects/, or "
            "raise the limit and run again: finished shards are kept"
        )
    for limit in LIMITS:
        most: float | None = getattr(quality, limit.option)
        part, whole = limit.part(counts), limit.whole(counts)
        if most is not None and part > most * whole:
            raise QualityError(
                f"{part} of {whole} {limit.what} ({part / whole:.2%}), quality.{limit.option} is {most:.2%}; "
                "not published. Mend the input, or raise the limit and run again: finished shards are kept"
            )
