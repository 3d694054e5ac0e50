"""Reading rows: from a slice of a file to batches of clean text, plus rejects with a reason.

Text and id columns are read as text, always; nothing is inferred from content. A bad row becomes
a reject and the rows around it go on. A file that cannot be read at all is an error.

Every reader is a generator of `RowBatch` and holds one bounded batch in memory. Files are opened
here; which files, is decided in `tokenmill.corpus`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc

from tokenmill import arrow_ipc, parquet
from tokenmill.columns import check_folder_columns, stored_type
from tokenmill.corpus import Slice, SourceFile
from tokenmill.csv_rows import csv_header, csv_rows
from tokenmill.errors import DataError
from tokenmill.job import InputSpec
from tokenmill.json_rows import json_keys, json_rows
from tokenmill.lines import CHUNK_BYTES, decompressed, iter_lines, strip_bom
from tokenmill.magic import check_is_text
from tokenmill.partitions import partition_columns
from tokenmill.rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    Cell,
    RowAction,
    RowBatch,
    RowBuilder,
    cut_line,
    in_batches,
    plain_json,
    row_columns,
)
from tokenmill.source_file import open_source
from tokenmill.storage_errors import mapped
from tokenmill.store import StorageConfig, open_filesystem
from tokenmill.texts import printable_cell

RANGE_BYTES = 8 << 20  # at most so much is fetched at once of a range of lines
READ_ROWS = 128


def read_slice(piece: Slice, spec: InputSpec, storage: StorageConfig) -> Iterator[RowBatch]:
    """Rows of one slice, in file order.

    Raises UnreadableFileError or DataError for a damaged file, StoreError for failing storage.
    """
    size = None if piece.num_bytes is None else min(piece.num_bytes, RANGE_BYTES)
    with open_source(piece.file, storage, size) as file:
        if piece.file.format in TABLE_READERS:
            yield from TABLE_READERS[piece.file.format](file, piece, spec)
            return
        whole = piece.first_byte is None
        chunks = decompressed(file, piece.file.uri, piece.file.compression) if whole else _lines(file, piece)
        yield from LINE_READERS[piece.file.format](chunks, piece, spec)


def _lines(file: IO[bytes], piece: Slice) -> Iterator[bytes]:
    """The bytes of a range of whole lines.  Raises DataError where its borders are no line ends."""
    assert piece.first_byte is not None
    assert piece.num_bytes is not None
    start, stop = piece.first_byte, piece.first_byte + piece.num_bytes
    edge, size = max(start - 1, 0), piece.file.size_bytes
    file.seek(edge)
    for at in range(edge, stop, CHUNK_BYTES):
        end = min(at + CHUNK_BYTES, stop)
        data = file.read(end - at)
        starts_well = at > edge or start == 0 or data.startswith(b"\n")
        ends_well = end < stop or stop == size or data.endswith(b"\n")
        if not (starts_well and ends_well):
            raise DataError(f"{piece.file.uri}: changed while the job ran; run the job again")
        yield data[start - edge :] if at == edge else data


# --- Parquet -------------------------------------------------------------------------------------


def _read_parquet(file: IO[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    uri, ordinal = piece.file.uri, piece.first_row
    first, num = piece.first_group, piece.num_groups
    groups = None if first is None or num is None else range(first, first + num)
    with parquet.open_parquet(file, uri) as opened:
        schema = opened.schema_arrow
    wanted = [name for name in spec.columns if name in schema.names]
    rows = parquet.iter_batches(file, uri, wanted, groups, _rows_at_once(piece))
    yield from _table_batches(schema, rows, ordinal, uri, spec)


def _read_arrow(file: IO[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    schema = arrow_ipc.read_schema(file, piece.file.uri)
    file.seek(0)
    rows = arrow_ipc.iter_ipc(file, piece.file.uri, READ_ROWS)
    yield from _table_batches(schema, rows, 0, piece.file.uri, spec)


def _table_batches(
    schema: pa.Schema, rows: Iterable[pa.RecordBatch], ordinal: int, uri: str, spec: InputSpec
) -> Iterator[RowBatch]:
    """Batches of a table's rows, first an empty one that tells the columns' types."""
    folders = partition_columns(uri, own=schema.names)
    wanted = [name for name in spec.columns if name not in folders]
    empty = [pa.array([], schema.field(name).type) for name in wanted]
    none = pa.record_batch(empty, schema=pa.schema([schema.field(name) for name in wanted]))
    chosen = (batch.select(wanted) for batch in itertools.chain([none], rows))
    for batch in _gathered(chosen):
        yield _table_batch(_with_folders(batch, folders, spec), ordinal, uri, spec)
        ordinal += len(batch)


def _gathered(few_rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of up to BATCH_ROWS rows and about BATCH_BYTES from smaller ones; at least one.

    Subtle: only rows in memory show their size. A dictionary of one long text may stand for gigabytes.
    """
    held: list[pa.RecordBatch] = []
    num_rows, num_bytes = 0, 0
    for batch in itertools.chain.from_iterable(map(_plain, few_rows)):
        held.append(batch)
        num_rows, num_bytes = num_rows + len(batch), num_bytes + batch.nbytes
        if num_rows + READ_ROWS > BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield pa.concat_batches(held)
            held, num_rows, num_bytes = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def _plain(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch without dictionaries and runs, in pieces of about BATCH_BYTES; at least one."""
    plain = pa.record_batch([_spelled_out(c) for c in batch.columns], names=batch.schema.names)
    step = max(1, len(plain) * BATCH_BYTES // max(plain.nbytes, 1))
    yield from (plain.slice(start, step) for start in range(0, max(len(plain), 1), step))


def _spelled_out(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.DictionaryArray):
        return column.dictionary_decode()
    return pc.run_end_decode(column) if isinstance(column, pa.RunEndEncodedArray) else column


def _rows_at_once(piece: Slice) -> int:
    """Rows to read at a time: fewer where texts are long."""
    if not piece.num_rows:
        return READ_ROWS
    return max(1, min(READ_ROWS, BATCH_BYTES * piece.num_rows // max(piece.text_bytes, 1)))


def _with_folders(
    batch: pa.RecordBatch, folders: Mapping[str, str | None], spec: InputSpec
) -> pa.RecordBatch:
    """The batch, and the wanted columns that the file's folders hold."""
    for name in spec.columns:
        if name in folders:
            batch = batch.append_column(name, pa.array([folders[name]] * len(batch), pa.string()))
    return batch


def _table_batch(batch: pa.RecordBatch, first_row: int, uri: str, spec: InputSpec) -> RowBatch:
    builder = RowBuilder(uri, spec)
    ids = _id_strings(batch.column(spec.id)) if spec.id else pa.nulls(len(batch), pa.string())
    kept = {name: _clean(_as_stored(batch.column(name)), builder) for name in spec.keep}
    cells = zip(*(_text_values(batch.column(name)) for name in spec.text_columns), strict=True)
    good = [
        index
        for index, (row, row_id) in enumerate(zip(cells, ids.to_pylist(), strict=True))
        if builder.add(
            first_row + index,
            row,
            row_id,
            others=lambda index=index: {name: column[index].as_py() for name, column in kept.items()},  # type: ignore[misc]
        )
    ]
    taken = pa.array(good, pa.int64())
    arrays = [
        pa.array([builder.uri] * len(good), pa.string()),
        pc.add(taken, first_row),
        ids.take(taken),
        *(column.take(taken) for column in kept.values()),
    ]
    schema = row_columns({name: column.type for name, column in kept.items()})
    return builder.finish(pa.record_batch(arrays, schema=schema))


def _id_strings(column: pa.Array) -> pa.Array:
    """Ids as text, whatever they are."""
    if isinstance(column, pa.ExtensionArray):
        return pa.array([None if v is None else str(v) for v in column.to_pylist()], pa.string())
    try:
        text = column.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.binary()).to_pylist()
        return pa.array([None if v is None else v.decode("utf-8", "replace") for v in raw], pa.string())
    return text


def _clean(column: pa.Array, builder: RowBuilder) -> pa.Array:
    """A kept column. Bytes that are not UTF-8 become U+FFFD, and are counted."""
    if not pa.types.is_string(column.type):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.binary()).to_pylist()
        decoded = [None if v is None else v.decode("utf-8", "replace") for v in raw]
        for before, after in zip(raw, decoded, strict=True):
            if after is not None and after.encode("utf-8") != before:
                builder.count_replaced(after.count("\ufffd") - before.count("\ufffd".encode()))
        return pa.array(decoded, pa.string())
    return column


def _as_stored(column: pa.Array) -> pa.Array:
    """A column in the type that it is stored in. Subtle: safe=True would refuse text that is not UTF-8."""
    wanted = stored_type(column.type)
    return column if column.type == wanted else column.cast(wanted, safe=False)


def _text_values(column: pa.Array) -> list[Cell]:
    """Strings; raw bytes where the bytes may not be text (Parquet does not promise that they are);
    JSON where a cell is a list or struct.
    """
    if pa.types.is_null(column.type):
        return [None] * len(column)
    if pa.types.is_nested(column.type):
        return [None if value is None else plain_json(value) for value in column.to_pylist()]
    try:
        text = column.cast(pa.large_string())
        text.validate(full=True)
    except pa.ArrowInvalid:
        return [_as_text(raw) for raw in column.cast(pa.large_binary()).to_pylist()]
    return text.to_pylist()  # type: ignore[no-any-return]


def _as_text(raw: bytes | None) -> str | bytes | None:
    try:
        return None if raw is None else raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


TABLE_READERS: Mapping[str, Callable[[IO[bytes], Slice, InputSpec], Iterator[RowBatch]]] = {
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}

# --- Plain text; JSONL is in `tokenmill.json_rows`, CSV in `tokenmill.csv_rows` ---


def _read_text(chunks: Iterable[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    lines = _file_as_line(chunks, spec) if spec.rows == "files" else iter_lines(chunks, spec.max_row_bytes)
    folders = partition_columns(piece.file.uri)
    row_id = printable_cell(folders[spec.id]) if spec.id else None
    kept = [printable_cell(folders[name]) for name in spec.keep]

    def row(ordinal: int, line: bytes, cut: bool) -> RowAction:
        if cut:
            return cut_line(ordinal, line, spec, row_id)
        return lambda builder: builder.add(ordinal, [strip_bom(line)], row_id, kept)

    rows = (row(ordinal, line, cut) for ordinal, (line, cut) in enumerate(lines, piece.first_row))
    return in_batches(lambda: RowBuilder(piece.file.uri, spec), rows)


def _file_as_line(chunks: Iterable[bytes], spec: InputSpec) -> Iterator[tuple[bytes, bool]]:
    """The whole file in the form of `iter_lines`: cut where it is too long."""
    data = bytearray()
    for chunk in chunks:
        data += chunk[: spec.max_row_bytes + 1 - len(data)]
        if len(data) > spec.max_row_bytes:
            yield bytes(data), True
            return
    yield bytes(data), False


def _read_jsonl(chunks: Iterable[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    rows = json_rows(chunks, spec, partition_columns(piece.file.uri), piece.first_row)
    return in_batches(lambda: RowBuilder(piece.file.uri, spec), rows)


def _read_csv(chunks: Iterable[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    uri = piece.file.uri
    return in_batches(lambda: RowBuilder(uri, spec), csv_rows(chunks, uri, spec))


LINE_READERS: Mapping[str, Callable[[Iterable[bytes], Slice, InputSpec], Iterator[RowBatch]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
}


def head_columns(file: SourceFile, spec: InputSpec, storage: StorageConfig) -> list[str]:
    """Column names at the head of a file of lines; none where that does not tell.

    Raises UnreadableFileError, and for a CSV header InputNotFoundError and ConfigError.
    """
    fs, path = open_filesystem(file.uri, storage)
    with mapped(f"reading {file.uri}"), fs.open(path, "rb", block_size=CHUNK_BYTES) as opened:
        chunks = decompressed(opened, file.uri, file.compression)
        first = next(chunks, b"")
        check_is_text(first, file.uri)
        return HEADS[file.format](itertools.chain([first], chunks), file.uri, spec)


def _folder_columns(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> list[str]:
    """Of plain text, which has no others."""
    del chunks
    check_folder_columns(uri, spec)
    return list(partition_columns(uri))


HEADS: Mapping[str, Callable[[Iterable[bytes], str, InputSpec], list[str]]] = {
    "csv": csv_header,
    "jsonl": json_keys,
    "text": _folder_columns,
}
