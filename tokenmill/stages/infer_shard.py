"""Stage two: a shard's tokens become results, in row order, with a receipt.

    reader thread -> window sorted by length -> batches under a token budget -> backend
        -> finite check -> back in row order -> writer thread

Nothing here knows torch. Legend: N rows of a window, U distinct sequences, V values of a row.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.accounting import Counts, Histogram
from tokenmill.backend import Backend, BackendInfo, Values
from tokenmill.batches import Ints, Uniques, find_uniques, pad_batch, plan_batches
from tokenmill.errors import BackendError, OutOfMemoryError
from tokenmill.job import Job
from tokenmill.overlap import Stopwatch, reading_ahead, writing_behind
from tokenmill.parquet import create_part, iter_part, part_footer
from tokenmill.plan import Shard
from tokenmill.progress import reporter
from tokenmill.receipts import Receipt, part_name, peak_memory_bytes, rejects_name, write_receipt
from tokenmill.results import ResultColumns
from tokenmill.rows import Reject
from tokenmill.schemas import kept_columns, results_schema
from tokenmill.stages.tokenize_shard import RejectsPart, carried_reject, footer
from tokenmill.store import Store

WINDOW_BYTES = 512 * 1024 * 1024  # what a window's ids and kept columns may take
NOT_CARRIED = frozenset({"chunk_index", "input_ids", "pair_start", "first_new", "num_unknown"})


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a worker counts.  max_batch_tokens: its budget, lowered to what the device turns out to bear."""

    max_batch_tokens: int
    counts: Counts = field(default_factory=Counts)
    latency_s: Histogram = field(default_factory=Histogram)
    watch: Stopwatch = field(default_factory=Stopwatch)


class Worker(Protocol):
    """Turns windows into results. One a shard."""

    @property
    def tally(self) -> Tally: ...

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """The columns of the task."""
        ...

    def compute(self, window: Window, schema: pa.Schema) -> tuple[pa.RecordBatch, list[Reject]]:
        """The results of a window's rows in their order, and a reject for each other one."""
        ...


class Computing(Protocol):
    """What a receipt says of a model; any `Backend` or `Generator`."""

    @property
    def info(self) -> BackendInfo: ...

    def device_memory_bytes(self) -> int: ...


def infer_shard(
    shard: Shard, model: Computing, worker: Worker, job: Job, store: Store, fingerprint: str
) -> Receipt:
    """Write the shard's results, its rejects and its receipt. Its token part must be there.

    worker: runs the model.  fingerprint: of the model, for the footer.
    Raises DataError, StoreError, BackendError and their transient leaves.
    """
    started = time.perf_counter()
    tokens_name = part_name("tokenize", shard.tokens_key)
    token_schema, _ = part_footer(store, tokens_name)
    in_chunks, marks = "first_new" in token_schema.names, marks_column(job, token_schema)
    schema = results_schema(kept_columns(token_schema), worker.fields, in_chunks)
    tally, watch = worker.tally, worker.tally.watch
    metadata = footer(job, "infer", shard.results_key, fingerprint)
    with ExitStack() as stack:
        windows = stack.enter_context(reading_ahead(_windows(store, tokens_name, job.run.window_rows, marks)))
        name = part_name("infer", shard.results_key)
        part = stack.enter_context(create_part(store, name, schema, metadata))
        rejects = RejectsPart(stack, store, rejects_name("infer", shard.results_key), shard.results_key)
        write = stack.enter_context(writing_behind())
        while True:
            with watch.timing("read"):
                window = next(windows, None)
            if window is None:
                break
            batch, bad = worker.compute(window, schema)
            _count(tally.counts, window, len(batch), bad)
            with watch.timing("write"):
                write(lambda batch=batch: part.write(batch))  # type: ignore[misc]
                rejects.write(bad)
        with watch.timing("write"):
            write(lambda: None)
    assert part.info is not None
    tally.counts.check(f"shard {shard.index} (infer)")
    receipt = Receipt(
        stage="infer",
        key=shard.results_key,
        job=job.name,
        shard=shard.index,
        part=part.info,
        rejects=rejects.info,
        counts=tally.counts,
        seconds={**watch.seconds, "wall": time.perf_counter() - started},
        latency_s=tally.latency_s,
        max_batch_tokens=tally.max_batch_tokens,
        peak_memory_bytes=peak_memory_bytes(),
        peak_device_memory_bytes=model.device_memory_bytes(),
        backend=model.info.to_json(),
    )
    write_receipt(store, receipt)
    reporter().shard_done("infer")
    return receipt


def marks_column(job: Job, token_schema: pa.Schema) -> str:
    """The column of `Window.starts_N`, where there is one."""
    return (
        "first_new" if "first_new" in token_schema.names and job.inference.task == "score" else "pair_start"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Rows that are sorted together: ragged ids, and the columns that go into the results.

    starts_N: what the backend must know of a row beside its ids: where its second text begins, or the
    first token to be scored.  firsts_T: the row that each text begins with, where a text may be several.
    """

    columns: pa.RecordBatch
    ids: npt.NDArray[np.int32]
    offsets_N1: Ints
    starts_N: Ints | None = None
    firsts_T: Ints | None = None

    @property
    def lengths_N(self) -> Ints:  # noqa: N802 (a shape suffix)
        return np.diff(self.offsets_N1)


def _windows(store: Store, name: str, window_rows: int, marks: str) -> Iterator[Window]:
    """Windows of `window_rows` rows, fewer where the rows are very wide; none for an empty part.

    All chunks of a text are in one window, however many they are.  marks: column of `Window.starts_N`.
    """
    held: list[pa.RecordBatch] = []
    for batch in iter_part(store, name):
        if held and sum(b.nbytes for b in (*held, batch)) > WINDOW_BYTES:
            held = yield from _cut_windows(held, sum(map(len, held)) - 1, marks)
        held.append(batch)
        if sum(map(len, held)) > window_rows:
            held = yield from _cut_windows(held, window_rows, marks)
    if held := [batch for batch in held if len(batch)]:
        yield window_of(pa.concat_batches(held), marks)


def _cut_windows(
    held: list[pa.RecordBatch], size: int, marks: str
) -> Generator[Window, None, list[pa.RecordBatch]]:
    """Windows of at most `size` rows, but of whole texts; what is left, the last text at least."""
    rows = pa.concat_batches(held)
    firsts = np.flatnonzero(rows["chunk_index"].to_numpy() == 0)
    start = 0
    while len(rows) - start > size:
        fitting, longer = firsts[(firsts > start) & (firsts <= start + size)], firsts[firsts > start + size]
        if not len(fitting) and not len(longer):
            break
        cut = int(fitting[-1] if len(fitting) else longer[0])
        yield window_of(rows.slice(start, cut - start), marks)
        start = cut
    return [rows.slice(start)]


def window_of(rows: pa.RecordBatch, marks: str) -> Window:
    """Rows of a token part.  marks: `marks_column`."""
    lists, names = rows["input_ids"], rows.schema.names
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return Window(
        columns=rows.select([name for name in names if name not in NOT_CARRIED]),
        ids=lists.values.to_numpy()[offsets[0] : offsets[-1]],
        offsets_N1=offsets - offsets[0],
        starts_N=rows[marks].to_numpy().astype(np.int64) if marks in names else None,
        firsts_T=np.flatnonzero(rows["chunk_index"].to_numpy() == 0) if "first_new" in names else None,
    )


class Inferring:
    """Runs windows through a backend.  Implements `Worker`.

    columns: of the job's task.
    """

    def __init__(self, backend: Backend, columns: ResultColumns, max_batch_tokens: int) -> None:
        self._backend, self._columns = backend, columns
        self._dtype = np.result_type(np.float32, columns.stored)
        self.tally = Tally(max_batch_tokens=max_batch_tokens)

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return self._columns.fields

    def compute(self, window: Window, schema: pa.Schema) -> tuple[pa.RecordBatch, list[Reject]]:
        values_NV, reasons = self.run(window)
        return _results(window, values_NV, reasons, self._columns, schema)

    def run(self, window: Window) -> tuple[Values, dict[int, str]]:
        """Values of all rows, shape (N, V), and the reason for each row that has none.

        Equal token sequences are computed once, those that come out NaN or infinite again in float32.
        """
        uniques = find_uniques(window.ids, window.offsets_N1, window.starts_N)
        rows_of_U = np.bincount(uniques.unique_of_row_N, minlength=len(uniques.first_rows_U))
        values_UV = np.zeros((len(rows_of_U), self._backend.info.num_values), dtype=self._dtype)
        reasons_U: dict[int, str] = {}
        everything_U = np.arange(len(rows_of_U))
        for batch_B, values_BV in self._batches(self._backend, window, uniques, everything_U, reasons_U):
            values_UV[batch_B] = values_BV
            rows, tokens = rows_of_U[batch_B], window.lengths_N[uniques.first_rows_U[batch_B]]
            reporter().advance("infer", int(rows.sum()), int((rows * tokens).sum()))
        self._recompute(window, uniques, values_UV, reasons_U)
        reasons_U.update(dict.fromkeys(_non_finite(values_UV).tolist(), "non_finite"))
        affected = np.flatnonzero(np.isin(uniques.unique_of_row_N, list(reasons_U)))
        reasons = {int(row): reasons_U[int(uniques.unique_of_row_N[row])] for row in affected}
        return values_UV[uniques.unique_of_row_N], reasons

    def _recompute(
        self, window: Window, uniques: Uniques, values_UV: Values, reasons_U: dict[int, str]
    ) -> None:
        """What low precision made NaN or infinite, once more in float32, in place."""
        bad_U = _non_finite(values_UV)
        exact = self._backend.in_fp32() if len(bad_U) else None
        if exact is None:
            return
        for batch_B, values_BV in self._batches(exact, window, uniques, bad_U, reasons_U):
            values_UV[batch_B] = values_BV
            self.tally.counts.rows_recomputed += len(batch_B)

    def _batches(
        self, backend: Backend, window: Window, uniques: Uniques, chosen_U: Ints, reasons_U: dict[int, str]
    ) -> Iterator[tuple[Ints, Values]]:
        """Chosen sequences and their values, a batch at a time; the reason for each that does not fit."""
        lengths_U = window.lengths_N[uniques.first_rows_U]
        todo = self._planned(lengths_U, chosen_U)
        while todo:
            batch_B = todo.pop()
            try:
                values_BV = self._run(backend, window, uniques.first_rows_U[batch_B])
            except OutOfMemoryError:
                self.tally.counts.out_of_memory += 1
                if len(batch_B) == 1:
                    reasons_U[int(batch_B[0])] = "out_of_memory"
                else:
                    todo = self._halve(lengths_U, [*todo, batch_B])
                continue
            yield batch_B, values_BV

    def _run(self, backend: Backend, window: Window, rows_B: Ints) -> Values:
        ids_BL, lengths_B = pad_batch(window.ids, window.offsets_N1, rows_B, backend.info.pad_id)
        start = time.perf_counter()
        with self.tally.watch.timing("compute"):
            starts_B = None if window.starts_N is None else window.starts_N[rows_B]
            values_BV = backend.run(ids_BL, lengths_B, starts_B)
        self.tally.latency_s.add(time.perf_counter() - start)
        if values_BV.shape != (len(rows_B), backend.info.num_values):
            raise BackendError(f"the backend gave {values_BV.shape} for {len(rows_B)} rows")
        self.tally.counts.batches += 1
        self.tally.counts.tokens_computed += int(lengths_B.sum())
        self.tally.counts.tokens_padded += ids_BL.size
        return values_BV

    def _halve(self, lengths_U: Ints, todo: list[Ints]) -> list[Ints]:
        """Plan what is left under half the budget of the batch that did not fit."""
        failed = todo[-1]
        size = int(lengths_U[failed].max()) * len(failed)
        self.tally.max_batch_tokens = max(min(size, self.tally.max_batch_tokens) // 2, 1)
        return self._planned(lengths_U, np.sort(np.concatenate(todo)))

    def _planned(self, lengths_U: Ints, chosen_U: Ints) -> list[Ints]:
        """Batches of chosen sequences, the first one last."""
        batches = plan_batches(lengths_U[chosen_U], self.tally.max_batch_tokens)
        return [chosen_U[batch] for batch in batches][::-1]


def _count(counts: Counts, window: Window, rows_out: int, bad: list[Reject]) -> None:
    counts.rows_in += rows_out + len(bad)
    counts.chunks += len(window.lengths_N)
    counts.rows_out += rows_out
    counts.tokens += int(window.lengths_N.sum())
    counts.rejects.update(reject.reason for reject in bad)


def _non_finite(values_UV: Values) -> Ints:
    """Rows with a value that is NaN or infinite."""
    return np.flatnonzero(~np.isfinite(values_UV).all(axis=1))


DETAILS = {
    "non_finite": "the model gave NaN or infinity, or more than inference.dtype can hold",
    "out_of_memory": "the row alone does not fit into the device's memory",
}


def _results(
    window: Window, values_NV: Values, reasons: dict[int, str], columns: ResultColumns, schema: pa.Schema
) -> tuple[pa.RecordBatch, list[Reject]]:
    """Result rows of the texts whose values are finite as they are stored, and the rejects."""
    if window.firsts_T is not None:
        window, values_NV, reasons = _pooled(window, window.firsts_T, values_NV, reasons, columns)
    with np.errstate(over="ignore"):  # what float16 cannot hold becomes infinite, and so a reject
        stored_NV = values_NV.astype(columns.stored)
    good = np.ones(len(stored_NV), dtype=bool)
    overflowed = np.flatnonzero(~np.isfinite(stored_NV).all(axis=1))
    reasons = {**dict.fromkeys(overflowed.tolist(), "non_finite"), **reasons}
    good[list(reasons)] = False
    kept = window.columns if good.all() else window.columns.filter(pa.array(good))
    made = columns.make(stored_NV if good.all() else stored_NV[good])
    return pa.record_batch([*kept.columns, *made], schema=schema), row_rejects(window, reasons)


def _pooled(
    chunks: Window, firsts_T: Ints, values_CV: Values, reasons: dict[int, str], columns: ResultColumns
) -> tuple[Window, Values, dict[int, str]]:
    """A row a text: its chunks' values pooled, their tokens counted together. One bad chunk is a bad text."""
    lengths_C = chunks.lengths_N
    texts_C = np.searchsorted(firsts_T, np.arange(len(lengths_C)), side="right") - 1
    num_T = np.diff(firsts_T, append=len(lengths_C)).astype(np.int32)
    rows = chunks.columns.take(pa.array(firsts_T))
    place = rows.schema.get_field_index("num_tokens")
    tokens_T = np.add.reduceat(lengths_C, firsts_T).astype(np.int32)
    rows = rows.set_column(place, "num_tokens", pa.array(tokens_T))
    rows = rows.append_column("num_chunks", pa.array(num_T))
    reasons = {int(texts_C[chunk]): reason for chunk, reason in sorted(reasons.items(), reverse=True)}
    window = Window(columns=rows, ids=chunks.ids, offsets_N1=chunks.offsets_N1)
    return window, columns.pool(values_CV, lengths_C, firsts_T), reasons


def row_rejects(window: Window, reasons: Mapping[int, str]) -> list[Reject]:
    """Of rows that the model could not do, in order.  reasons: a key of DETAILS for each."""
    return [
        carried_reject(window.columns, row, stage="infer", reason=reason, detail=DETAILS[reason])
        for row, reason in sorted(reasons.items())
    ]
