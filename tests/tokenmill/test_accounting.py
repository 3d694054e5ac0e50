"""Counts that balance, and histograms within their stated error."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.accounting import Counts, Histogram, per_second
from tokenmill.errors import AccountingError

values = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), max_size=60)


def histogram(numbers: list[float]) -> Histogram:
    result = Histogram()
    for number in numbers:
        result.add(number)
    return result


@given(values, st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 0.95, 1.0]))
def test_a_quantile_is_within_five_percent_of_the_sorted_list(numbers: list[float], share: float) -> None:
    found = histogram(numbers).quantile(share)
    if not numbers:
        assert found == 0.0
        return
    rank = max(math.ceil(share * len(numbers) - 1e-9), 1) if share else 1
    exact = sorted(numbers)[rank - 1]
    if share == 0.0 or exact == 0.0:
        assert found == 0.0
    else:
        assert found == pytest.approx(exact, rel=0.0501)


@given(values, values)
def test_merged_histograms_equal_the_histogram_of_all(left: list[float], right: list[float]) -> None:
    merged = histogram(left).merge(histogram(right))
    assert merged == histogram(left + right)
    assert merged.total == len(left) + len(right)


@given(values)
def test_a_histogram_survives_json(numbers: list[float]) -> None:
    before = histogram(numbers)
    assert Histogram.from_json(json.loads(json.dumps(before.to_json()))) == before


@given(values)
def test_bars_cover_every_positive_value_in_ascending_order(numbers: list[float]) -> None:
    bars = histogram(numbers).bars()
    assert sum(count for _, _, count in bars) == sum(number > 0 for number in numbers)
    assert bars == sorted(bars)
    assert all(low < high for low, high, _ in bars)


def test_the_median_of_the_docstring() -> None:
    assert 1.9 < histogram([1.0, 2.0, 100.0]).quantile(0.5) < 2.1


def test_adding_a_value_several_times_equals_adding_it_once_each() -> None:
    once, many = Histogram(), Histogram()
    once.add(3.0, 5)
    for _ in range(5):
        many.add(3.0)
    assert once == many


counted = st.builds(
    Counts,
    rows_in=st.integers(0, 9),
    rows_out=st.integers(0, 9),
    tokens=st.integers(0, 9),
    rejects=st.dictionaries(st.sampled_from(["bad_json", "null_text"]), st.integers(1, 5)).map(Counter),
)


@given(counted)
def test_counts_balance_or_raise(counts: Counts) -> None:
    if counts.rows_in == counts.rows_out + sum(counts.rejects.values()):
        counts.check("shard 0")
    else:
        with pytest.raises(AccountingError, match=r"shard 0: \d+ rows in, but"):
            counts.check("shard 0")


@given(st.lists(counted, max_size=5))
def test_a_total_is_the_sum_of_every_field(many: list[Counts]) -> None:
    total = Counts.total(many)
    assert total.rows_in == sum(counts.rows_in for counts in many)
    assert total.tokens == sum(counts.tokens for counts in many)
    assert total.rejects == sum((counts.rejects for counts in many), Counter())
    assert Counts.from_json(json.loads(json.dumps(total.to_json()))) == total


def test_rates_of_nothing_are_finite() -> None:
    nothing = Counts()
    figures = (nothing.reject_rate, nothing.unknown_rate, nothing.effective_token_ratio)
    assert figures == (0.0, 0.0, 1.0)
    assert per_second(5, 0) == 0.0
    assert per_second(10, 4) == 2.5
