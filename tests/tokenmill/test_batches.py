"""Batch planning against naive oracles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.batches import find_uniques, pad_batch, plan_batches

rows_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=30)
lengths_and_budget = st.tuples(
    st.lists(st.integers(1, 40), max_size=60), st.integers(min_value=1, max_value=120)
)


def ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return np.array([i for row in rows for i in row], dtype=np.int32), offsets


@given(lengths_and_budget)
def test_every_row_is_in_exactly_one_batch(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    batches = plan_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    assert all(len(batch) for batch in batches)


@given(lengths_and_budget)
def test_no_batch_of_several_rows_is_over_the_budget(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    for batch in plan_batches(lengths, budget):
        longest = max(lengths[row] for row in batch.tolist())
        assert len(batch) == 1 or longest * len(batch) <= budget


@given(lengths_and_budget)
def test_rows_come_longest_first_and_equal_ones_in_row_order(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    order = [row for batch in plan_batches(lengths, budget) for row in batch.tolist()]
    assert order == sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


@given(lengths_and_budget)
def test_a_batch_ends_early_only_for_a_half_full_one_of_equal_lengths(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    batches = [batch.tolist() for batch in plan_batches(lengths, budget)]
    for batch, following in pairwise(batches):
        longest = lengths[batch[0]]
        fits_one_more = longest * (len(batch) + 1) <= budget
        if fits_one_more:
            assert {lengths[row] for row in batch} == {longest}
            assert lengths[following[0]] != longest
            assert len(batch) * 2 >= budget // longest


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([5, 3, 3], 6, [[0], [1, 2]]),
        ([], 8, []),
        ([7], 1, [[0]]),
        ([2, 2, 2], 4, [[0, 1], [2]]),
        ([4, 4, 1], 12, [[0, 1, 2]]),
        ([4, 4, 1, 1], 12, [[0, 1], [2, 3]]),
        ([4, 1, 1], 12, [[0, 1, 2]]),
        ([0, 0], 4, [[0, 1]]),
    ],
)
def test_planned_batches_by_example(lengths: list[int], budget: int, expected: list[list[int]]) -> None:
    assert [batch.tolist() for batch in plan_batches(lengths, budget)] == expected


@given(rows_of_ids)
def test_uniques_are_numbered_in_order_of_first_appearance(rows: list[list[int]]) -> None:
    distinct: list[list[int]] = []
    for row in rows:
        if row not in distinct:
            distinct.append(row)
    uniques = find_uniques(*ragged(rows))
    assert uniques.unique_of_row_N.tolist() == [distinct.index(row) for row in rows]
    assert [rows[first] for first in uniques.first_rows_U.tolist()] == distinct
    assert uniques.first_rows_U.tolist() == [rows.index(row) for row in distinct]


def test_rows_are_told_apart_by_where_they_end() -> None:
    uniques = find_uniques(*ragged([[1, 2], [1], [2], [12], [1, 2]]))
    assert uniques.unique_of_row_N.tolist() == [0, 1, 2, 3, 0]


@given(rows_of_ids, st.integers(10, 12), st.randoms(use_true_random=False))
def test_padding_keeps_every_id_and_fills_the_rest(rows: list[list[int]], pad: int, random) -> None:
    chosen = [random.randrange(len(rows)) for _ in range(5)] if rows else []
    ids_BL, lengths_B = pad_batch(*ragged(rows), np.array(chosen, dtype=np.int64), pad)
    longest = max((len(rows[row]) for row in chosen), default=0)
    assert ids_BL.tolist() == [rows[row] + [pad] * (longest - len(rows[row])) for row in chosen]
    assert lengths_B.tolist() == [len(rows[row]) for row in chosen]
    assert ids_BL.dtype == np.int64
