"""Group-by over results, by DuckDB: counts, tokens, and the centroid of the vectors.

One thread and a fixed order, so that the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import duckdb
import pyarrow as pa

MEMORY_LIMIT = "2GB"


def group_rows(
    rows: Callable[[], Iterator[pa.RecordBatch]], schema: pa.Schema, columns: Sequence[str]
) -> pa.Table:
    """One row a group, sorted by the group columns, nulls last.

    rows: gives the results anew at each call.  schema: of the results.
    Columns: the group columns, num_rows, num_tokens, mean_tokens, centroid (float32 list).
    """
    names = ", ".join(_quoted(name) for name in columns)
    counts = _query(
        rows,
        schema,
        f"SELECT {names}, count(*) AS num_rows, sum(num_tokens)::BIGINT AS num_tokens, "
        f"avg(num_tokens) AS mean_tokens FROM results GROUP BY ALL ORDER BY ALL NULLS LAST",
    )
    size = schema.field("embedding").type.list_size
    centroids = _query(
        rows,
        schema,
        f"WITH cells AS (SELECT {names}, unnest(embedding::FLOAT[{size}]::FLOAT[]) AS cell, "
        f"unnest(range({size})) AS place FROM results), "
        f"means AS (SELECT {names}, place, avg(cell::DOUBLE)::FLOAT AS mean FROM cells GROUP BY ALL) "
        f"SELECT {names}, list(mean ORDER BY place) AS centroid FROM means "
        f"GROUP BY {names} ORDER BY {names} NULLS LAST",
    )
    return counts.append_column("centroid", centroids["centroid"]).combine_chunks()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _query(rows: Callable[[], Iterator[pa.RecordBatch]], schema: pa.Schema, sql: str) -> pa.Table:
    with duckdb.connect() as connection:
        connection.execute("SET threads TO 1")
        connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        single = _with_float32(schema)
        batches = (_cast(batch, single) for batch in rows())
        connection.register("results", pa.RecordBatchReader.from_batches(single, batches))
        return connection.sql(sql).to_arrow_table()


def _with_float32(schema: pa.Schema) -> pa.Schema:
    """DuckDB reads no half floats."""
    place = schema.get_field_index("embedding")
    vector = pa.list_(pa.float32(), schema.field(place).type.list_size)
    return schema.set(place, pa.field("embedding", vector)).remove_metadata()


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.Table.from_batches([batch]).cast(schema).combine_chunks().to_batches()[0]
