"""Charts as geometry: every bar within the plot, heights in proportion, counts kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import quantities
from tokenmill.accounting import Histogram
from tokenmill.charts import (
    MAX_BINS,
    MAX_COLUMNS,
    Chart,
    histogram_chart,
    round_up,
    throughput_chart,
    time_bar,
)


def shards(rates: list[float | None]) -> list[dict[str, Any]]:
    """Lines of the table of shards, one second each; None for a shard that is not done."""
    return [
        {"shard": i, "infer": None if rate is None else {"seconds": 1.0, "tokens_per_second": rate}}
        for i, rate in enumerate(rates)
    ]


def lengths_chart(values: list[float]) -> Chart:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    quantiles = {"p50": histogram.quantile(0.5), "p99": histogram.quantile(0.99)}
    return histogram_chart(histogram.bars(), label=quantities.count, base=2, unit="rows", quantiles=quantiles)


def test_heights_are_in_proportion_to_the_rates() -> None:
    chart = throughput_chart(shards([100.0, 200.0, None]), "infer")
    assert chart is not None
    assert [bar.height for bar in chart.bars] == [50, 100, 0]
    assert [tick.label for tick in chart.y_ticks] == ["0", "100", "200"]
    assert chart.bars[1].title == "shard 1: 200 tokens/s"


def test_many_shards_share_columns() -> None:
    chart = throughput_chart(shards([10.0] * 1000), "infer")
    assert chart is not None
    assert len(chart.bars) <= MAX_COLUMNS
    assert chart.bars[0].title == "shards 0 to 8: 10 tokens/s"


@pytest.mark.parametrize("rates", [[], [None, None]])
def test_nothing_done_draws_nothing(rates: list[float | None]) -> None:
    assert throughput_chart(shards(rates), "infer") is None


@given(st.lists(st.floats(1e-4, 1e6), min_size=1, max_size=200))
def test_a_histogram_stays_within_its_plot_and_loses_no_value(values: list[float]) -> None:
    chart = lengths_chart(values)
    assert len(chart.bars) <= MAX_BINS + 1
    assert all(bar.x >= 0 and bar.x + bar.width <= 100.001 and 0 < bar.height <= 100 for bar in chart.bars)
    assert all(0 <= tick.at <= 100 for tick in (*chart.x_ticks, *chart.y_ticks, *chart.marks))
    assert sum(int(bar.title.split(": ")[1].split()[0].replace(",", "")) for bar in chart.bars) == len(values)


def test_round_values_label_a_logarithmic_axis() -> None:
    chart = lengths_chart([float(n) for n in range(4, 260)])
    assert [tick.label for tick in chart.x_ticks] == ["4", "8", "16", "32", "64", "128", "256"]


@pytest.mark.parametrize(
    ("value", "expected"), [(3.1, 4), (13, 20), (0, 1), (100, 100), (8.5, 10), (0.031, 0.04)]
)
def test_rounding_up(value: float, expected: float) -> None:
    assert round_up(value) == pytest.approx(expected)


def test_a_time_bar_is_as_long_as_all_its_pieces() -> None:
    pieces = time_bar({"read": 1.0, "compute": 3.0, "write": 0.0})
    assert [(piece.name, piece.x, piece.width) for piece in pieces] == [("read", 0, 25), ("compute", 25, 75)]
    assert time_bar({}) == ()
