"""Numbers as people read them: counts, shares, seconds, bytes. Pure; every figure keeps its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

THOUSANDS: Sequence[tuple[float, str]] = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def count(number: float) -> str:
    """Example: 1234567 -> "1,234,567"."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Example: (1, "row") -> "1 row", (1234, "row") -> "1,234 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """Three significant figures. Example: 1234567 -> "1.23M", 950 -> "950", 2.5 -> "2.5"."""
    for size, unit in THOUSANDS:
        if abs(number) >= size * 0.9995:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{float(f'{number:.3g}'):g}"


def percent(share: float) -> str:
    """Never rounds something to nothing or to all. Example: 0.3623 -> "36.2 %", 1e-5 -> "<0.01 %"."""
    value = 100 * share
    if 0 < value < 0.01:
        return "<0.01 %"
    if 99.95 <= value < 100:
        return ">99.9 %"
    return f"{float(f'{value:.1f}'):g} %" if value >= 10 else f"{float(f'{value:.2g}'):g} %"


def seconds(value: float) -> str:
    """Example: 0.0123 -> "12.3 ms", 3.25 -> "3.25 s", 754 -> "12 min 34 s", 0 -> "0 s"."""
    if value >= 99.5:
        return _clock(round(value))
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size * 0.9995:
            return f"{float(f'{value / size:.3g}'):g} {unit}"
    return "<1 µs" if value > 0 else "0 s"


def _clock(whole_seconds: int) -> str:
    minutes, rest = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size_bytes(number: float) -> str:
    """Example: 0 -> "0 B", 1536 -> "1.5 KiB"."""
    power = 0
    while number >= 1023.5 and power < len(BINARY_UNITS) - 1:
        number, power = number / 1024, power + 1
    shown = count(number) if number >= 100 else f"{float(f'{number:.3g}'):g}"
    return f"{shown} {BINARY_UNITS[power]}"


def significant(number: float, digits: int = 6) -> float:
    """Example: 0.1234567 -> 0.123457. Keeps a JSON file short."""
    return float(f"{number:.{digits}g}")


def agreement_told(agreement: Mapping[str, Any]) -> str:
    """How int8 compares with float32, by `Agreement.to_json`.

    Example: "int8 agrees with fp32 by 0.9978 (mean cosine of 256 rows; at least 0.99), 1.9 times as fast."
    """
    speed = agreement["speed"]
    return (
        f"{agreement['precision']} agrees with fp32 by {agreement['value']:.4f} ({agreement['measure']} of "
        f"{counted(agreement['rows'], 'row')}; at least {agreement['least']:g})"
        f"{f', {speed:.1f} times as fast' if speed else ''}."
    )
