"""What the gates look at: a few numbers for each row of a part, a bounded number of rows at a time.

Arrow and NumPy only; what the numbers must be is for `tokenmill.gates` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.parquet import iter_part
from tokenmill.store import Store

if TYPE_CHECKING:
    import pandas as pd

BATCH_ROWS = 200_000
ROW_KEY = ("source_file", "row_ordinal")

Int64s = npt.NDArray[np.int64]
Figures = Callable[[pa.RecordBatch], dict[str, Any]]


def iter_frames(
    store: Store, parts: Sequence[tuple[int, str]], columns: Sequence[str], figures: Callable[[], Figures]
) -> Iterator[pd.DataFrame]:
    """Shard, row key and figures of all rows, in order, at most about BATCH_ROWS at a time.

    parts: index of the shard, and name.  columns: what is read beside the row key.
    figures: makes, for each part, the function that turns its batches into figures, in order.
    """
    held: list[pa.RecordBatch] = []
    for shard, part in parts:
        figures_of = figures()
        for batch in iter_part(store, part, (*ROW_KEY, *columns)):
            places = {
                "shard": np.full(len(batch), shard, np.int32),
                "source_file": batch["source_file"].dictionary_encode(),
                "row_ordinal": batch["row_ordinal"],
            }
            held.append(pa.record_batch({**places, **figures_of(batch)}))
            if sum(map(len, held)) >= BATCH_ROWS:
                yield _frame(held)
                held = []
    if held:
        yield _frame(held)


def _frame(batches: Sequence[pa.RecordBatch]) -> pd.DataFrame:
    frame: pd.DataFrame = pa.Table.from_batches(batches).unify_dictionaries().to_pandas()
    return frame


def token_figures() -> Figures:
    """min_id, max_id and num_ids of a row, beside its num_tokens and num_unknown.

    A null count, and a null among the ids, is -1.
    """

    def figures(batch: pa.RecordBatch) -> dict[str, Any]:
        lists = batch["input_ids"]
        offsets_N1 = lists.offsets.to_numpy().astype(np.int64)
        ids = lists.values.fill_null(-1).to_numpy()[: offsets_N1[-1]]
        lengths_N = np.diff(offsets_N1)
        filled_N = lengths_N > 0
        min_N, max_N = np.zeros_like(lengths_N), np.zeros_like(lengths_N)
        min_N[filled_N] = np.minimum.reduceat(ids, offsets_N1[:-1][filled_N])
        max_N[filled_N] = np.maximum.reduceat(ids, offsets_N1[:-1][filled_N])
        counts = {name: batch[name].fill_null(-1) for name in ("num_tokens", "num_unknown")}
        return {"min_id": min_N, "max_id": max_N, "num_ids": lengths_N, **counts}

    return figures


def result_figures(columns: Sequence[str]) -> Callable[[], Figures]:
    """row_step and num_nonfinite of a row, and what is looked at of its task's columns.

    columns: numbers, taken as they are; `embedding` becomes its norm. A null number, and a null vector,
    has no finite value.
    row_step: the row's ordinal less that of the row before it of the same file and part; below 1,
    a row comes twice or out of order.
    """

    def start() -> Figures:
        last_ordinals: dict[str | None, int] = {}

        def figures(batch: pa.RecordBatch) -> dict[str, Any]:
            files = batch["source_file"].dictionary_encode()
            ordinals_N = batch["row_ordinal"].fill_null(-1).to_numpy()
            found: dict[str, Any] = {"row_step": row_steps(files, ordinals_N, last_ordinals)}
            num_bad_N = np.zeros(len(batch), np.int64)
            for name in columns:
                values_ND = _numbers(batch[name])
                num_bad_N += (~np.isfinite(values_ND)).sum(axis=1)
                with np.errstate(over="ignore", invalid="ignore"):
                    norm_N = np.sqrt(np.einsum("nd,nd->n", values_ND, values_ND))
                found |= (
                    {"norm": norm_N.astype(np.float64)} if name == "embedding" else {name: values_ND[:, 0]}
                )
            return {**found, "num_nonfinite": num_bad_N}

        return figures

    return start


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """A column of numbers or of vectors, shape (N, D); NaN where it is null."""
    if not pa.types.is_fixed_size_list(column.type):
        numbers_N: npt.NDArray[Any] = column.cast(pa.float64()).fill_null(np.nan).to_numpy(False)
        return numbers_N[:, None]
    size = column.type.list_size
    values = column.values.slice(column.offset * size, len(column) * size)
    values_ND: npt.NDArray[Any] = values.to_numpy(False).reshape(len(column), size).astype(np.float32)
    values_ND[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return values_ND


def row_steps(files: pa.DictionaryArray, ordinals_N: Int64s, last: dict[str | None, int]) -> Int64s:
    """Distance of each row from the row before it of the same file; 1 for a file's first row.

    last: the last ordinal seen of each file; brought up to date.
    Example: files a, b, a, a with ordinals 5, 0, 7, 7 -> 1, 1, 2, 0
    """
    codes_N = files.indices.fill_null(-1).to_numpy()
    names = [*files.dictionary.to_pylist(), None]  # the last is that of code -1, a null
    order_N = np.argsort(codes_N, kind="stable")
    sorted_N = ordinals_N[order_N]
    before_N = np.roll(sorted_N, 1)
    firsts = np.flatnonzero(np.diff(codes_N[order_N], prepend=-2))
    for first, stop in zip(firsts, [*firsts[1:], len(order_N)], strict=False):
        name = names[codes_N[order_N[first]]]
        before_N[first] = last.get(name, sorted_N[first] - 1)
        last[name] = int(sorted_N[stop - 1])
    steps_N = np.empty_like(sorted_N)
    steps_N[order_N] = sorted_N - before_N
    return steps_N
