"""Stage one: the rows of a shard become a token part, rejects and a receipt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.accounting import Counts, Histogram
from tokenmill.encoding import Refusals, TokenRows, encode_rows
from tokenmill.job import Job
from tokenmill.overlap import Stopwatch, reading_ahead
from tokenmill.parquet import FileInfo, Part, create_part
from tokenmill.plan import Shard
from tokenmill.progress import reporter
from tokenmill.readers import read_slice
from tokenmill.receipts import Receipt, part_name, peak_memory_bytes, rejects_name, write_receipt
from tokenmill.rows import Reject, RowBatch, columns_json
from tokenmill.schemas import REJECTS_SCHEMA, RESULTS_VERSION, TOKENS_VERSION, kept_columns, tokens_schema
from tokenmill.settle import TokenizeSetup
from tokenmill.store import StorageConfig, Store


def tokenize_shard(
    shard: Shard, setup: TokenizeSetup, job: Job, store: Store, storage: StorageConfig
) -> Receipt:
    """Write the shard's token part, its rejects and its receipt.

    storage: how to open the input.  Raises DataError, StoreError, StoreUnavailableError.
    """
    started = time.perf_counter()
    worker = _Tokenizing(setup, job)
    watch = worker.watch
    name = part_name("tokenize", shard.tokens_key)
    with ExitStack() as stack:
        batches = stack.enter_context(reading_ahead(_read(shard, job, storage)))
        part: Part | None = None
        rejects = RejectsPart(stack, store, rejects_name("tokenize", shard.tokens_key), shard.tokens_key)
        while True:
            with watch.timing("read"):
                batch = next(batches, None)
            if batch is None:
                break
            table, bad = worker.tokenize(batch)
            if part is None:
                metadata = footer(job, "tokenize", shard.tokens_key, setup.tokenizer.info.fingerprint)
                part = stack.enter_context(create_part(store, name, table.schema, metadata))
            with watch.timing("write"):
                part.write(table)
                rejects.write(bad)
            reporter().advance(
                "tokenize", batch.rows_in, int(pa.compute.sum(table["num_tokens"]).as_py() or 0)
            )
    assert part is not None  # every reader gives at least one batch
    assert part.info is not None
    worker.counts.check(f"shard {shard.index} (tokenize)")
    receipt = Receipt(
        stage="tokenize",
        key=shard.tokens_key,
        job=job.name,
        shard=shard.index,
        part=part.info,
        rejects=rejects.info,
        counts=worker.counts,
        seconds={**watch.seconds, "wall": time.perf_counter() - started},
        lengths=worker.lengths,
        peak_memory_bytes=peak_memory_bytes(),
    )
    write_receipt(store, receipt)
    reporter().shard_done("tokenize")
    return receipt


def footer(job: Job, stage: str, key: str, made_by: str) -> dict[str, str]:
    """Footer metadata of a part. Nothing in it differs between two runs of one shard."""
    return {
        "job": job.name,
        "stage": stage,
        "shard_key": key,
        "fingerprint": made_by,
        "schema_version": str(TOKENS_VERSION if stage == "tokenize" else RESULTS_VERSION),
    }


def _read(shard: Shard, job: Job, storage: StorageConfig) -> Iterator[RowBatch]:
    for piece in shard.slices:
        yield from read_slice(piece, job.input, storage)


class RejectsPart:
    """The rejects of a shard; a file only if there are any."""

    def __init__(self, stack: ExitStack, store: Store, name: str, key: str) -> None:
        self._stack, self._store, self._name, self._key = stack, store, name, key
        self._part: Part | None = None

    def write(self, rejects: list[Reject]) -> None:
        if not rejects:
            return
        if self._part is None:
            part = create_part(self._store, self._name, REJECTS_SCHEMA, {"shard_key": self._key})
            self._part = self._stack.enter_context(part)
        rows = [asdict(reject) for reject in rejects]
        self._part.write(pa.RecordBatch.from_pylist(rows, schema=REJECTS_SCHEMA))

    @property
    def info(self) -> FileInfo | None:
        return self._part.info if self._part else None


def token_table(setup: TokenizeSetup, job: Job, rows: RowBatch) -> pa.RecordBatch:
    """Token rows of the rows that a token part would hold."""
    return _Tokenizing(setup, job).tokenize(rows)[0]


class _Tokenizing:
    """Turns batches of rows into batches of token rows, counting everything."""

    def __init__(self, setup: TokenizeSetup, job: Job) -> None:
        self._setup, self._job = setup, job
        self.counts, self.lengths, self.watch = Counts(), Histogram(), Stopwatch()

    def tokenize(self, batch: RowBatch) -> tuple[pa.RecordBatch, list[Reject]]:
        """Token rows of the good rows, and every reject of the batch."""
        with self.watch.timing("compute"):
            rows = encode_rows(self._setup, batch.texts, batch.pairs)
        with self.watch.timing("pack"):
            good = np.ones(len(batch.texts), dtype=bool)
            good[list(rows.refused)] = False
            table = _token_rows(batch.columns, rows, good)
            bad = batch.rejects + _rejects(batch, rows.refused)
            self._count(batch, rows, table, bad)
        return table, sorted(bad, key=lambda reject: reject.row_ordinal)

    def _count(self, batch: RowBatch, rows: TokenRows, table: pa.RecordBatch, bad: list[Reject]) -> None:
        counts = self.counts
        num_tokens, dropped = (table[name].to_numpy() for name in ("num_tokens", "num_tokens_dropped"))
        counts.rows_in += batch.rows_in
        counts.rows_out += len(batch.texts) - len(rows.refused)
        counts.chunks += len(table)
        counts.rejects.update(reject.reason for reject in bad)
        counts.rows_blank += sum(1 for text in batch.texts if not text.strip())
        counts.rows_scrubbed += batch.rows_scrubbed
        counts.chars_replaced += batch.chars_replaced
        counts.lines_blank += batch.lines_blank
        counts.rows_with_special += int((rows.special_N > 0).sum())
        counts.rows_with_removed += int((rows.lost.removed_N > 0).sum())
        counts.rows_with_unknown += int((rows.num_unknown_N > 0).sum())
        counts.chars_removed += int(rows.lost.removed_N.sum())
        counts.chars_unknown += int(rows.lost.unknown_N.sum())
        counts.rows_truncated += int((dropped > 0).sum())
        counts.tokens += int(num_tokens.sum())
        counts.tokens_dropped += int(dropped.sum())
        counts.tokens_unknown += int(table["num_unknown"].to_numpy().sum())
        for length, num_rows in zip(*np.unique(num_tokens, return_counts=True), strict=True):
            self.lengths.add(float(length), int(num_rows))


def _rejects(batch: RowBatch, refused: Refusals) -> list[Reject]:
    return [
        carried_reject(
            batch.columns,
            row,
            stage="tokenize",
            reason=reason,
            detail=detail,
            text=batch.texts[row],
            pair=batch.pairs[row] if batch.pairs else None,
        )
        for row, (reason, detail) in sorted(refused.items())
    ]


def carried_reject(
    columns: pa.RecordBatch,
    row: int,
    *,
    stage: str,
    reason: str,
    detail: str,
    text: str | None = None,
    pair: str | None = None,
) -> Reject:
    """The reject of a row that was read well.  columns: row key, id and kept columns."""
    others = {} if pair is None else {"pair": pair}
    names = ("source_file", "row_ordinal", "id")
    source, ordinal, row_id = (columns[name][row].as_py() for name in names)
    return Reject(
        source_file=source,
        row_ordinal=ordinal,
        id=row_id,
        stage=stage,
        reason=reason,
        detail=detail,
        text=text,
        text_is=None if text is None else "text",
        columns=columns_json(
            {**others, **{name: columns[name][row].as_py() for name in kept_columns(columns.schema)}}
        ),
    )


def _token_rows(columns: pa.RecordBatch, rows: TokenRows, good: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """The good rows as a batch of the token dataset."""
    cut, chunks = rows.cut, rows.cut.chunks
    lengths_N = np.diff(cut.offsets_N1)
    pairs, in_chunks = cut.pair_starts_N is not None, chunks is not None
    schema = tokens_schema(kept_columns(columns.schema), pairs=pairs, chunks=in_chunks)
    if chunks is not None:
        columns, good = columns.take(pa.array(chunks.text_N)), good[chunks.text_N]
    ids = pa.ListArray.from_arrays(
        pa.array(cut.offsets_N1.astype(np.int32)), pa.array(cut.ids), type=schema.field("input_ids").type
    )
    counts = [
        pa.array(np.zeros(len(lengths_N), np.int32) if chunks is None else chunks.index_N),
        ids,
        *([pa.array(cut.pair_starts_N)] if cut.pair_starts_N is not None else []),
        *([pa.array(chunks.first_new_N)] if chunks is not None else []),
        pa.array(lengths_N.astype(np.int32)),
        pa.array(cut.num_dropped_N),
        pa.array(rows.num_unknown_N),
    ]
    whole = pa.record_batch([*columns.columns, *counts], schema=schema)
    return whole if good.all() else whole.filter(pa.array(good))
