"""Batch planning: which rows run together. Pure numpy: no torch, no I/O.

Legend: N rows of a window, B rows of a batch, L longest row of a batch in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniques:
    """The distinct token sequences of a window, and which one each row is."""

    first_rows_U: Ints
    unique_of_row_N: Ints


def find_uniques(
    ids: npt.NDArray[np.int32], offsets_N1: Ints, marks_N: npt.NDArray[np.int64] | None = None
) -> Uniques:
    """Number the distinct rows of a ragged array in order of first appearance.

    ids: all rows' tokens one after another.  offsets_N1: row r is ids[offsets[r]:offsets[r+1]].
    marks_N: rows with different marks are distinct (where the second text of a pair begins).
    Example: rows [[1, 2], [3], [1, 2]] -> first_rows [0, 1], unique_of_row [0, 1, 0]
    """
    seen: dict[tuple[bytes, int], int] = {}
    first_rows: list[int] = []
    unique_of_row = np.empty(len(offsets_N1) - 1, dtype=np.int64)
    raw, width = ids.tobytes(), ids.itemsize
    bounds = (offsets_N1 * width).tolist()
    marks = [0] * len(unique_of_row) if marks_N is None else marks_N.tolist()
    for row, (start, stop) in enumerate(pairwise(bounds)):
        number = seen.setdefault((raw[start:stop], marks[row]), len(first_rows))
        if number == len(first_rows):
            first_rows.append(row)
        unique_of_row[row] = number
    return Uniques(first_rows_U=np.array(first_rows, dtype=np.int64), unique_of_row_N=unique_of_row)


def plan_batches(lengths_N: npt.ArrayLike, max_batch_tokens: int) -> list[Ints]:
    """Pack rows so that longest x rows <= max_batch_tokens, longest first.

    A row longer than the budget gets a batch of its own: the device decides whether it fits.
    A batch that is at least half full ends where the length changes: batches of equal lengths
    need neither padding nor a mask.

    lengths_N: tokens per row.  Returns row numbers, every row exactly once, ties in row order.
    Example: [5, 3, 3], budget 6 -> [[0], [1, 2]]
    Source: token budget after text-embeddings-inference, core/src/queue.rs.
    """
    lengths = np.asarray(lengths_N, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        longest = max(int(lengths[order[start]]), 1)
        room = max(max_batch_tokens // longest, 1)
        stop = min(start + room, len(order))
        stop = _cut_at_length_change(lengths[order[start:stop]], room, stop < len(order)) + start
        batches.append(order[start:stop])
        start = stop
    return batches


def _cut_at_length_change(lengths_B: Ints, room: int, more_follow: bool) -> int:
    """Rows to take: all, or fewer if that leaves a batch of equal lengths at least half full."""
    equal = int(np.searchsorted(-lengths_B, -lengths_B[0], side="right"))
    return equal if more_follow and equal * 2 >= room else len(lengths_B)


def pad_batch(
    ids: npt.NDArray[np.int32], offsets_N1: Ints, rows_B: Ints, pad_id: int
) -> tuple[npt.NDArray[np.int64], Ints]:
    """Right-padded ids_BL and lengths_B of the chosen rows.

    Example: rows [[7, 8], [9]] with pad 0 -> [[7, 8], [9, 0]], [2, 1]
    """
    starts_B = offsets_N1[rows_B]
    lengths_B = offsets_N1[rows_B + 1] - starts_B
    longest = int(lengths_B.max(initial=0))
    columns_L = np.arange(longest)
    real_BL = columns_L < lengths_B[:, None]
    ids_BL = np.full((len(rows_B), longest), pad_id, dtype=np.int64)
    ids_BL[real_BL] = ids[(starts_B[:, None] + columns_L)[real_BL]]
    return ids_BL, lengths_B
