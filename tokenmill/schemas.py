"""The columns of every dataset that tokenmill writes, each an explicit, versioned `pa.schema`.

Nothing is ever inferred from the first rows. A change to a schema changes its version, the
version is part of every shard key, and so old parts are never mixed with new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

TOKENS_VERSION = 3
RESULTS_VERSION = 3
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
    pa.field("first_new", pa.int32(), nullable=False),
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

NUM_CHUNKS = pa.field("num_chunks", pa.int32(), nullable=False)
RESERVED = frozenset(f.name for f in (*ROW_KEY, *TOKEN_COLUMNS, NUM_CHUNKS))
RESULT_NAMES: Mapping[str, frozenset[str]] = {
    "embed": frozenset({"embedding"}),
    "classify": frozenset({"label", "score", "labels", "scores"}),
    "rank": frozenset({"score"}),
    "score": frozenset({"nll", "num_scored", "perplexity"}),
    "generate": frozenset({"text", "finish_reason", "num_prompt_tokens", "num_output_tokens", "outputs"}),
}
GROUP_COUNTS = (
    pa.field("num_rows", pa.int64()),
    pa.field("num_tokens", pa.int64()),
    pa.field("mean_tokens", pa.float64()),
)
GROUP_FIGURES: Mapping[str, tuple[pa.Field, ...]] = {
    "embed": (pa.field("centroid", pa.list_(pa.float32())),),
    "classify": (pa.field("label_counts", pa.map_(pa.string(), pa.int64())),),
    "rank": (pa.field("mean_score", pa.float64()),),
    "score": (pa.field("num_scored", pa.int64()), pa.field("perplexity", pa.float64())),
    "generate": (pa.field("num_output_tokens", pa.int64()), pa.field("mean_output_tokens", pa.float64())),
}

FLOATS: Mapping[str, pa.DataType] = {"float32": pa.float32(), "float16": pa.float16()}


def tokens_schema(keep: Mapping[str, pa.DataType], pairs: bool = False, chunks: bool = False) -> pa.Schema:
    """Schema of the token dataset: row key, kept columns, ids and their counts.

    keep: name and type of the columns carried through from the input.  pairs: rows are pairs of texts;
    `pair_start` is the place of the second one's first token.  chunks: a text may be several rows;
    `first_new` is the place of the first token that the chunk before does not have.
    """
    kept = (pa.field(name, dtype) for name, dtype in keep.items())
    left_out = {*(() if pairs else ("pair_start",)), *(() if chunks else ("first_new",))}
    return pa.schema([*ROW_KEY, *kept, *(f for f in TOKEN_COLUMNS if f.name not in left_out)])


def results_schema(
    keep: Mapping[str, pa.DataType], fields: Iterable[pa.Field], chunks: bool = False
) -> pa.Schema:
    """Schema of a result: row key, kept columns, token counts and the task's own columns.

    chunks: rows were computed in chunks, whose tokens are counted together.
    """
    kept = (pa.field(name, kind) for name, kind in keep.items())
    counts = (f for f in TOKEN_COLUMNS if f.name in ("num_tokens", "num_tokens_dropped"))
    return pa.schema([*ROW_KEY, *kept, *counts, *([NUM_CHUNKS] if chunks else []), *fields])


def embed_fields(dimensions: int, dtype: str) -> tuple[pa.Field, ...]:
    """dimensions: length of one vector.  dtype: "float32" or "float16"."""
    item = pa.field("item", FLOATS[dtype], nullable=False)
    return (pa.field("embedding", pa.list_(item, dimensions), nullable=False),)


def classify_fields(labels: Iterable[str], *, several: bool, all_scores: bool) -> tuple[pa.Field, ...]:
    """The best label and its score.  several: and every label that holds.  all_scores: and every score."""
    best = (pa.field("label", pa.string(), nullable=False), pa.field("score", pa.float32(), nullable=False))
    held = (pa.field("labels", pa.list_(pa.string()), nullable=False),) if several else ()
    each = pa.struct([pa.field(label, pa.float32(), nullable=False) for label in labels])
    return (*best, *held, *((pa.field("scores", each, nullable=False),) if all_scores else ()))


def rank_fields() -> tuple[pa.Field, ...]:
    """How well the second text of a pair fits the first, by the model's own scale."""
    return (pa.field("score", pa.float32(), nullable=False),)


def score_fields() -> tuple[pa.Field, ...]:
    """nll: sum over the scored tokens, in nats.  perplexity: exp(nll / num_scored)."""
    return (
        pa.field("nll", pa.float64(), nullable=False),
        pa.field("num_scored", pa.int32(), nullable=False),
        pa.field("perplexity", pa.float64()),
    )


def generate_fields(*, several: bool) -> tuple[pa.Field, ...]:
    """What was generated, and why it ended: "stop" or "length".  several: a list of them; tokens in all.

    num_output_tokens: the token that ended it included.
    """
    output = (
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    )
    counts = tuple(
        pa.field(name, pa.int32(), nullable=False) for name in ("num_prompt_tokens", "num_output_tokens")
    )
    if not several:
        return (*output, *counts)
    each = pa.field("item", pa.struct([*output, counts[1]]), nullable=False)
    return (pa.field("outputs", pa.list_(each), nullable=False), *counts)


REJECTS_SCHEMA = pa.schema(REJECT_COLUMNS)


def kept_columns(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Name and type of the columns of a token part that were carried through from the input."""
    return {f.name: f.type for f in schema if f.name not in RESERVED}
