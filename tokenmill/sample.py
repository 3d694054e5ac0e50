"""A few rows of a job, spread over its shards: for what must be measured on the user's own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenmill.parquet import iter_part, part_footer
from tokenmill.plan import Shard
from tokenmill.readers import read_slice
from tokenmill.receipts import part_name
from tokenmill.rows import RowBatch
from tokenmill.settle import Setup
from tokenmill.stages.infer_shard import Window, marks_column, window_of
from tokenmill.stages.tokenize_shard import token_table
from tokenmill.store import StorageConfig, Store

SAMPLE_SHARDS = 4


def sample_shards(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """At most SAMPLE_SHARDS of them, spread evenly."""
    return tuple(shards[:: max(1, len(shards) // SAMPLE_SHARDS)][:SAMPLE_SHARDS])


def sample_rows(
    setup: Setup, shards: Sequence[Shard], storage: StorageConfig, max_rows: int
) -> Iterator[RowBatch]:
    """The first good rows of each shard, at most `max_rows`, without its rejects.  storage: of the input."""
    spec = setup.job.input
    for shard in shards:
        batches = read_slice(shard.slices[0], spec, storage)
        batch = next((batch for batch in batches if batch.texts), None)
        if batch is not None:
            yield replace(
                batch,
                columns=batch.columns.slice(0, max_rows),
                texts=batch.texts[:max_rows],
                pairs=batch.pairs[:max_rows] if batch.pairs is not None else None,
                rejects=[],
            )


def sample_windows(
    setup: Setup, shards: Sequence[Shard], storage: StorageConfig, store: Store, max_rows: int
) -> Iterator[Window]:
    """As `sample_rows`, in tokens.  A shard that does not say where its rows are is tokenized already."""
    unread = [shard for shard in shards if shard.slices]
    for rows in sample_rows(setup, unread, storage, max_rows):
        table = token_table(setup.tokenize, setup.job, rows)
        if len(table):
            yield window_of(table, marks_column(setup.job, table.schema))
    for shard in shards:
        if not shard.slices:
            name = part_name("tokenize", shard.tokens_key)
            marks = marks_column(setup.job, part_footer(store, name)[0])
            table = next((batch for batch in iter_part(store, name) if len(batch)), None)
            if table is not None:
                yield window_of(table.slice(0, max_rows), marks)
