"""Charts as geometry: where each bar and each label goes, in percent. Pure; a template draws them.

Drawn by hand rather than by a plotting library: the page's own colours (light and dark) and fonts
apply, labels keep their size on a phone, and the same figures give the same bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.accounting import GROWTH, per_second
from tokenmill.quantities import count, percent, seconds, short

MAX_COLUMNS = 120
MAX_BINS = 32
MIN_BUCKETS = 2  # whole numbers would leave gaps in narrower bins
LABEL_GAP = 11.0  # percent of the width between two labels
ROUND_STEPS = (1, 2, 4, 6, 8, 10)

Label = Callable[[float], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """All in percent of the plot; x and width from the left, height from the bottom."""

    x: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A label at a place, in percent."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A column chart. `marks` are upright lines with a label."""

    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Tick, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of a stacked bar, in percent of the whole."""

    name: str
    x: float
    width: float
    title: str


def throughput_chart(shards: Sequence[Mapping[str, Any]], stage: str) -> Chart | None:
    """Tokens per second of each shard that a stage has done, in corpus order.

    Many shards share a column: their tokens over their seconds.  None if there is nothing to draw.
    """
    if not any(shard[stage] for shard in shards):
        return None
    groups = list(_neighbours(shards))
    rates = [_rate([s for s in group if s[stage]], stage) for group in groups]
    top = round_up(max(rates))
    width = 100 / len(groups)
    bars = (
        Bar(
            x=i * width,
            width=width * 0.86,
            height=100 * rate / top,
            title=f"{_span(group)}: {count(rate)} tokens/s",
        )
        for i, (group, rate) in enumerate(zip(groups, rates, strict=True))
    )
    return Chart(bars=tuple(bars), x_ticks=_shard_ticks(groups), y_ticks=_y_ticks(top))


def _neighbours(shards: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    size = math.ceil(len(shards) / MAX_COLUMNS)
    for start in range(0, len(shards), size):
        yield shards[start : start + size]


def _rate(shards: Sequence[Mapping[str, Any]], stage: str) -> float:
    spent = sum(shard[stage]["seconds"] for shard in shards)
    tokens = sum(shard[stage]["seconds"] * shard[stage]["tokens_per_second"] for shard in shards)
    return per_second(tokens, spent)


def _span(group: Sequence[Mapping[str, Any]]) -> str:
    first, last = group[0]["shard"], group[-1]["shard"]
    return f"shard {first}" if first == last else f"shards {first} to {last}"


def _shard_ticks(groups: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Tick, ...]:
    width = 100 / len(groups)
    ticks = [Tick(at=(i + 0.43) * width, label=str(group[0]["shard"])) for i, group in enumerate(groups)]
    return tuple(_spread(ticks))


def histogram_chart(
    bars: Sequence[Sequence[float]], *, label: Label, base: float, unit: str, quantiles: Mapping[str, float]
) -> Chart:
    """Counts over a logarithmic axis.

    bars: (low, high, count) of buckets that are not empty, ascending, each GROWTH times wider.
    label: writes a value of the axis.  base: 2 or 10, for round values on it.  unit: what is counted.
    """
    axis = _LogAxis.over(bars)
    bins = _rebinned(bars, axis)
    top = round_up(max(bins.values()))
    columns = (
        Bar(
            x=axis.place(axis.edge(number)),
            width=axis.bin_width * 0.9,
            height=100 * n / top,
            title=f"{_range(label(axis.edge(number)), label(axis.edge(number + 1)))}: {count(n)} {unit}",
        )
        for number, n in sorted(bins.items())
    )
    marks = (Tick(at=axis.place(value), label=name) for name, value in quantiles.items() if value > 0)
    ticks = (Tick(at=axis.place(value), label=label(value)) for value in _round_values(axis, base))
    return Chart(
        bars=tuple(columns), x_ticks=tuple(_spread(ticks)), y_ticks=_y_ticks(top), marks=tuple(marks)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LogAxis:
    """Bins of `step` buckets each, from `first` up to, not including, `stop`."""

    step: int
    first: int
    stop: int

    @classmethod
    def over(cls, bars: Sequence[Sequence[float]]) -> _LogAxis:
        low, high = _bucket(bars[0]), _bucket(bars[-1])
        step = max(MIN_BUCKETS, math.ceil((high - low + 1) / MAX_BINS))
        return cls(step=step, first=low // step, stop=high // step + 1)

    @property
    def bin_width(self) -> float:
        return 100 / (self.stop - self.first)

    def edge(self, number: int) -> float:
        """Low end of a bin."""
        return float(GROWTH ** (number * self.step))

    def place(self, value: float) -> float:
        """Where a value is, in percent; the nearer end for one beyond the axis."""
        at = (math.log(value, GROWTH) / self.step - self.first) * self.bin_width
        return min(100.0, max(0.0, at))


def _bucket(bar: Sequence[float]) -> int:
    return round(math.log(bar[0], GROWTH))


def _rebinned(bars: Sequence[Sequence[float]], axis: _LogAxis) -> dict[int, float]:
    bins: Counter[int] = Counter()
    for bar in bars:
        bins[_bucket(bar) // axis.step] += int(bar[2])
    return dict(bins)


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _round_values(axis: _LogAxis, base: float) -> Iterator[float]:
    """Powers of the base on the axis, for base 10 also 2 and 5 times them."""
    low, high = axis.edge(axis.first), axis.edge(axis.stop)
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    factors = (1, 2, 5) if base == 10 else (1,)
    values = (factor * base**power for power in powers for factor in factors)
    return (value for value in values if low <= value <= high)


def _spread(ticks: Iterable[Tick]) -> Iterator[Tick]:
    """The ticks that are far enough from the one before."""
    last = -math.inf
    for tick in ticks:
        if tick.at - last >= LABEL_GAP:
            last = tick.at
            yield tick


def round_up(value: float) -> float:
    """The next round number with a round half. Example: 3.1 -> 4, 13 -> 20, 0 -> 1."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in ROUND_STEPS if step * power >= value), 10 * power)


def _y_ticks(top: float) -> tuple[Tick, ...]:
    return tuple(Tick(at=100 * share, label=short(top * share)) for share in (0, 0.5, 1))


def time_bar(by_activity: Mapping[str, float]) -> tuple[Segment, ...]:
    """Where a stage's seconds went; activities that took no time are left out."""
    total = sum(by_activity.values())
    segments: list[Segment] = []
    x = 0.0
    for name, value in by_activity.items():
        if value > 0:
            width = 100 * value / total
            title = f"{name}: {seconds(value)}, {percent(value / total)}"
            segments.append(Segment(name=name, x=x, width=width, title=title))
            x += width
    return tuple(segments)
