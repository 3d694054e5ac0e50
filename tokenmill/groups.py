"""Group-by over results, by DuckDB: counts, tokens, and a figure of the task, such as the mean vector.

One thread and a fixed order, so that the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory

import duckdb
import pyarrow as pa

from tokenmill.errors import DataError, TokenmillError
from tokenmill.schemas import GROUP_COUNTS, GROUP_FIGURES

MEMORY_LIMIT = "2GB"


def group_rows(
    rows: Callable[[], Iterator[pa.RecordBatch]], schema: pa.Schema, columns: Sequence[str], task: str
) -> pa.Table:
    """One row a group, sorted by the group columns, nulls last.

    rows: gives the results anew at each call.  schema: of the results.
    Columns: the group columns, `GROUP_COUNTS` and the task's `GROUP_FIGURES`.
    Raises DataError for columns that cannot be grouped by.
    """
    keys = [f"g{place}" for place in range(len(columns))]
    view = _View(rows, schema, columns, COLUMNS_USED[task])
    figures = _centroids(view, schema, keys) if task == "embed" else []
    names = ", ".join(keys)
    counted = ["count(*)", "sum(num_tokens)::BIGINT", "avg(num_tokens)", *SUMS[task]]
    counts = view.query(
        f"SELECT {names}, {', '.join(counted)} FROM results GROUP BY {names} ORDER BY {_order(keys)}"
    )
    wanted = pa.schema([*(schema.field(name) for name in columns), *GROUP_COUNTS, *GROUP_FIGURES[task]])
    table = pa.Table.from_arrays([*counts.columns, *figures], names=wanted.names)
    return table.cast(wanted).combine_chunks()


COLUMNS_USED: Mapping[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "classify": ("label",),
    "rank": ("score",),
    "score": ("nll", "num_scored"),
    "generate": ("num_output_tokens",),
}
SUMS: Mapping[str, tuple[str, ...]] = {
    "embed": (),
    "classify": ("histogram(label)",),
    "rank": ("avg(score::DOUBLE)",),
    "score": ("sum(num_scored)::BIGINT", "exp(sum(nll) / nullif(sum(num_scored), 0))"),
    "generate": ("sum(num_output_tokens)::BIGINT", "avg(num_output_tokens)"),
}


def _centroids(view: _View, schema: pa.Schema, keys: Sequence[str]) -> list[pa.ChunkedArray]:
    """The mean vector of each group."""
    names, size = ", ".join(keys), schema.field("embedding").type.list_size
    table = view.query(
        f"WITH cells AS (SELECT {names}, unnest(embedding::FLOAT[]) AS cell, "
        f"unnest(range({size})) AS place FROM results), "
        f"means AS (SELECT {names}, place, avg(cell::DOUBLE)::FLOAT AS mean FROM cells GROUP BY ALL) "
        f"SELECT {names}, list(mean ORDER BY place) AS centroid FROM means "
        f"GROUP BY {names} ORDER BY {_order(keys)}"
    )
    return [table["centroid"]]


def _order(keys: Sequence[str]) -> str:
    return ", ".join(f"{key} NULLS LAST" for key in keys)


class _View:
    """The results as DuckDB sees them: only the columns that are asked for, under plain names.

    Subtle: to DuckDB, `ID` and `id` are one column.
    """

    def __init__(
        self,
        rows: Callable[[], Iterator[pa.RecordBatch]],
        schema: pa.Schema,
        columns: Sequence[str],
        used: Sequence[str],
    ) -> None:
        self._rows, self._columns = rows, [*columns, "num_tokens", *used]
        self._shown = ", ".join(columns)
        names = [*(f"g{place}" for place in range(len(columns))), "num_tokens", *used]
        types = [_readable(schema.field(name).type) for name in self._columns]
        self._schema = pa.schema(zip(names, types, strict=True))

    def query(self, sql: str) -> pa.Table:
        failed: list[TokenmillError] = []
        with duckdb.connect() as connection, TemporaryDirectory(prefix="tokenmill-groups-") as spill:
            connection.execute(f"SET temp_directory = '{spill}'")
            connection.execute("SET threads TO 1")
            connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
            try:
                connection.register(
                    "results", pa.RecordBatchReader.from_batches(self._schema, self._batches(failed))
                )
                return connection.sql(sql).to_arrow_table()
            except duckdb.Error as exc:
                if failed:
                    raise failed[0] from exc
                detail = " ".join(str(exc).split())
                raise DataError(f"groups by {self._shown} failed: {detail}") from exc

    def _batches(self, failed: list[TokenmillError]) -> Iterator[pa.RecordBatch]:
        """Subtle: an error of the rows passes through DuckDB as text only; it is kept in `failed`."""
        try:
            for batch in self._rows():
                yield self._batch(batch)
        except TokenmillError as exc:
            failed.append(exc)
            raise

    def _batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [batch[name].cast(f.type) for name, f in zip(self._columns, self._schema, strict=True)]
        return pa.record_batch(arrays, schema=self._schema)


def _readable(dtype: pa.DataType) -> pa.DataType:
    """DuckDB reads no half floats."""
    if pa.types.is_float16(dtype):
        return pa.float32()
    is_vector = pa.types.is_fixed_size_list(dtype) and pa.types.is_float16(dtype.value_type)
    return pa.list_(pa.float32(), dtype.list_size) if is_vector else dtype
