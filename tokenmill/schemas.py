"""The columns of every dataset that tokenmill writes, each an explicit, versioned `pa.schema`.

Nothing is ever inferred from the first rows. A change to a schema changes its version, the
version is part of every shard key, and so old parts are never mixed with new ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

TOKENS_VERSION = 2
RESULTS_VERSION = 2
REJECTS_VERSION = 2

ROW_KEY = (
    pa.field("source_file", pa.string(), nullable=False),
    pa.field("row_ordinal", pa.int64(), nullable=False),
    pa.field("id", pa.string()),
)

TOKEN_COLUMNS = (
    pa.field("chunk_index", pa.int32(), nullable=False),
    pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    pa.field("pair_start", pa.int32(), nullable=False),
    pa.field("num_tokens", pa.int32(), nullable=False),
    pa.field("num_tokens_dropped", pa.int32(), nullable=False),
    pa.field("num_unknown", pa.int32(), nullable=False),
)

REJECT_COLUMNS = (
    *ROW_KEY,
    pa.field("stage", pa.string(), nullable=False),
    pa.field("reason", pa.string(), nullable=False),
    pa.field("detail", pa.string(), nullable=False),
    pa.field("text", pa.string()),
    pa.field("text_is", pa.string()),
    pa.field("columns", pa.string()),
)

RESERVED = frozenset(f.name for f in ROW_KEY + TOKEN_COLUMNS) | {"embedding"}
GROUP_FIGURES = (
    pa.field("num_rows", pa.int64()),
    pa.field("num_tokens", pa.int64()),
    pa.field("mean_tokens", pa.float64()),
    pa.field("centroid", pa.list_(pa.float32())),
)

FLOATS: Mapping[str, pa.DataType] = {"float32": pa.float32(), "float16": pa.float16()}


def tokens_schema(keep: Mapping[str, pa.DataType], pairs: bool = False) -> pa.Schema:
    """Schema of the token dataset: row key, kept columns, ids and their counts.

    keep: name and type of the columns carried through from the input.  pairs: rows are pairs of texts;
    `pair_start` is the place of the second one's first token.
    """
    kept = (pa.field(name, dtype) for name, dtype in keep.items())
    columns = (f for f in TOKEN_COLUMNS if pairs or f.name != "pair_start")
    return pa.schema([*ROW_KEY, *kept, *columns])


def embeddings_schema(keep: Mapping[str, pa.DataType], dimensions: int, dtype: str) -> pa.Schema:
    """Schema of an `embed` result: row key, kept columns, token counts and the vector.

    dimensions: length of one vector.  dtype: "float32" or "float16".
    """
    kept = (pa.field(name, kind) for name, kind in keep.items())
    item = pa.field("item", FLOATS[dtype], nullable=False)
    vector = pa.field("embedding", pa.list_(item, dimensions), nullable=False)
    counts = (f for f in TOKEN_COLUMNS if f.name in ("num_tokens", "num_tokens_dropped"))
    return pa.schema([*ROW_KEY, *kept, *counts, vector])


REJECTS_SCHEMA = pa.schema(REJECT_COLUMNS)


def kept_columns(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Name and type of the columns that were carried through from the input."""
    return {f.name: f.type for f in schema if f.name not in RESERVED}
