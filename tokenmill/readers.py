"""Reading rows: from a slice of a file to batches of clean text, plus rejects with a reason.

Text and id columns are read as text, always; nothing is inferred from content. A bad row becomes
a reject and the rows around it go on. A file that cannot be read at all is an error.

Every reader is a generator of `RowBatch` and holds one bounded batch in memory. Files are opened
here; which files, is decided in `tokenmill.corpus`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tokenmill import parquet
from tokenmill.columns import missing_column
from tokenmill.corpus import Slice
from tokenmill.errors import DataError, UnreadableFileError
from tokenmill.job import InputSpec
from tokenmill.lines import decompressed, iter_lines, strip_bom
from tokenmill.rows import (
    BATCH_ROWS,
    LONE_SURROGATE,
    SAMPLE_CHARS,
    RowBatch,
    RowBuilder,
    printable,
    row_columns,
)
from tokenmill.store import StorageConfig, mapped, open_filesystem

RowAction = Callable[[RowBuilder], None]


def read_slice(piece: Slice, spec: InputSpec, storage: StorageConfig) -> Iterator[RowBatch]:
    """Rows of one slice, in file order.

    Raises UnreadableFileError or DataError for a damaged file, StoreError for failing storage.
    """
    uri = piece.file.uri
    fs, path = open_filesystem(uri, storage)
    with mapped(f"reading {uri}"):
        _check_unchanged(fs, path, piece)
        with fs.open(path, "rb") as file:
            if piece.file.format == "parquet":
                yield from _read_parquet(file, piece, spec)
            else:
                yield from LINE_READERS[piece.file.format](file, piece, spec)


def _check_unchanged(fs: Any, path: str, piece: Slice) -> None:
    """Raises DataError if the file was replaced after the job was planned."""
    size = int(fs.info(path)["size"])
    if size != piece.file.size_bytes:
        raise DataError(
            f"{piece.file.uri}: changed while the job ran ({piece.file.size_bytes} bytes when planned, "
            f"{size} now); run the job again"
        )


# --- Parquet -------------------------------------------------------------------------------------


def _read_parquet(file: IO[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    uri, ordinal = piece.file.uri, piece.first_row
    first, num = piece.first_group, piece.num_groups
    groups = None if first is None or num is None else range(first, first + num)
    wanted = list(dict.fromkeys([spec.text, *([spec.id] if spec.id else []), *spec.keep]))
    with parquet.open_parquet(file, uri) as opened:
        empty = opened.schema_arrow.empty_table().select(wanted)
    yield _parquet_batch(
        pa.record_batch([c.combine_chunks() for c in empty.columns], schema=empty.schema), ordinal, uri, spec
    )
    for batch in parquet.iter_batches(file, uri, wanted, groups, BATCH_ROWS):
        yield _parquet_batch(batch, ordinal, uri, spec)
        ordinal += len(batch)


def _parquet_batch(batch: pa.RecordBatch, first_row: int, uri: str, spec: InputSpec) -> RowBatch:
    builder = RowBuilder(uri, spec)
    ids = _id_strings(batch.column(spec.id)) if spec.id else pa.nulls(len(batch), pa.string())
    texts, good = [], []
    for index, value in enumerate(_text_values(batch.column(spec.text))):
        before = len(builder.texts)
        row_id = ids[index].as_py()
        if isinstance(value, bytes):
            decoded = builder.decode(first_row + index, value)
            if decoded is not None:
                builder.add(first_row + index, decoded, row_id, [])
        elif value is not None and len(value) > spec.max_row_bytes:
            builder.reject(first_row + index, "row_too_large", _too_large(spec), row_id, value)
        else:
            builder.add(first_row + index, value, row_id, [])
        if len(builder.texts) > before:
            good.append(index)
            texts.append(builder.texts[-1])
    taken = pa.array(good, pa.int64())
    kept = {name: _decoded(batch.column(name)).take(taken) for name in spec.keep}
    schema = row_columns({name: column.type for name, column in kept.items()})
    arrays = [
        pa.array([uri] * len(good), pa.string()),
        pc.add(taken, first_row),
        ids.take(taken),
        *kept.values(),
    ]
    return RowBatch(
        columns=pa.record_batch(arrays, schema=schema),
        texts=texts,
        rejects=builder.rejects,
        rows_scrubbed=builder.rows_scrubbed,
        chars_replaced=builder.chars_replaced,
    )


def _too_large(spec: InputSpec) -> str:
    return f"longer than input.max_row_bytes = {spec.max_row_bytes}"


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _id_strings(column: pa.Array) -> pa.Array:
    column = _decoded(column)
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _text_values(column: pa.Array) -> list[str | bytes | None]:
    """Strings; raw bytes where the bytes may not be text (Parquet does not promise that they are)."""
    column = _decoded(column)
    if pa.types.is_null(column.type):
        return [None] * len(column)
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


# --- JSONL, CSV, plain text: each row is an action on the current builder ---


def _in_batches(builder_of: Callable[[], RowBuilder], rows: Iterator[RowAction]) -> Iterator[RowBatch]:
    """Apply each row to the current builder; give a batch whenever one is full."""
    builder = builder_of()
    for row in rows:
        row(builder)
        if builder.is_full:
            yield builder.build()
            builder = builder_of()
    yield builder.build()


def _read_text(file: IO[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    def rows() -> Iterator[RowAction]:
        if spec.rows == "files":
            yield _whole_file_row(decompressed(file, piece.file.uri, piece.file.compression), spec)
            return
        lines = iter_lines(decompressed(file, piece.file.uri, piece.file.compression), spec.max_row_bytes)
        for ordinal, (line, cut) in enumerate(lines):
            yield _text_row(ordinal, strip_bom(line), cut, spec)

    return _in_batches(lambda: RowBuilder(piece.file.uri, spec), rows())


def _text_row(ordinal: int, line: bytes, cut: bool, spec: InputSpec) -> RowAction:
    if cut:
        sample = line[:SAMPLE_CHARS].decode(spec.encoding, "replace")
        return lambda b: b.reject(ordinal, "row_too_large", _too_large(spec), None, sample)
    return lambda b: b.add_bytes(ordinal, line)


def _whole_file_row(chunks: Iterable[bytes], spec: InputSpec) -> RowAction:
    data = bytearray()
    for chunk in chunks:
        data += chunk[: spec.max_row_bytes + 1 - len(data)]
        if len(data) > spec.max_row_bytes:
            return _text_row(0, bytes(data), True, spec)
    return _text_row(0, strip_bom(bytes(data)), False, spec)


def _read_jsonl(file: IO[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    def rows() -> Iterator[RowAction]:
        lines = iter_lines(decompressed(file, piece.file.uri, piece.file.compression), spec.max_row_bytes)
        for ordinal, (line, cut) in enumerate(lines):
            yield _json_row(ordinal, strip_bom(line), cut, spec)

    return _in_batches(lambda: RowBuilder(piece.file.uri, spec), rows())


def _json_row(ordinal: int, line: bytes, cut: bool, spec: InputSpec) -> RowAction:
    if cut:
        return _text_row(ordinal, line, cut, spec)
    if not line.strip():
        return _count_blank

    def take(builder: RowBuilder) -> None:
        text = builder.decode(ordinal, line)
        if text is None:
            return
        try:
            row = parse_json(text)
        except ValueError as exc:
            builder.reject(ordinal, "bad_json", f"line {ordinal + 1}: {exc}", None, text)
            return
        if not isinstance(row, dict):
            builder.reject(ordinal, "bad_json", f"line {ordinal + 1}: not an object", None, text)
            return
        row_id = _as_printable(row.get(spec.id)) if spec.id else None
        if spec.text not in row:
            detail = f"line {ordinal + 1}: no key {spec.text!r}"
            builder.reject(ordinal, "missing_text", detail, row_id, text)
            return
        kept = [_as_printable(row.get(name)) for name in spec.keep]
        builder.add(ordinal, _json_text(row[spec.text]), row_id, kept)

    return take


def _count_blank(builder: RowBuilder) -> None:
    builder.lines_blank += 1


def parse_json(text: str) -> Any:
    """One JSON value. Accepts lone surrogate escapes and NaN, which strict parsers refuse.

    Raises ValueError.
    """
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        try:
            return json.loads(text)
        except RecursionError as exc:
            raise ValueError("nested too deeply") from exc


def _json_text(value: Any) -> str | None:
    """A JSON value as text: strings as they are, null as None, all else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _as_printable(value: Any) -> str | None:
    text = _json_text(value)
    return text if text is None else printable(text)


def _read_csv(file: IO[bytes], piece: Slice, spec: InputSpec) -> Iterator[RowBatch]:
    uri = piece.file.uri
    csv.field_size_limit(max(spec.max_row_bytes, csv.field_size_limit()))
    lines = _csv_lines(decompressed(file, piece.file.uri, piece.file.compression), spec, uri)
    records = csv.reader(lines, delimiter="\t" if ".tsv" in uri.lower() else ",", strict=True)

    def rows() -> Iterator[RowAction]:
        header = next(records, None)
        if header is None:
            return
        places = _csv_places(header, spec, uri)
        ordinal = 0
        while True:
            first_line = records.line_num + 1
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as exc:
                yield _bad_record(ordinal, f"line {first_line}: {exc}", None)
                ordinal += 1
                continue
            if not record:
                yield _count_blank
                continue
            yield _csv_row(ordinal, record, len(header), places, first_line, spec)
            ordinal += 1

    return _in_batches(lambda: RowBuilder(uri, spec), rows())


def _csv_lines(chunks: Iterable[bytes], spec: InputSpec, uri: str) -> Iterator[str]:
    """Physical lines with their newline. Undecodable bytes become lone surrogates U+DC80-U+DCFF."""
    for number, (line, cut) in enumerate(iter_lines(chunks, 4 * spec.max_row_bytes)):
        if cut:
            raise UnreadableFileError(
                f"{uri}: line {number + 1} is longer than 4 x input.max_row_bytes; is it a CSV file?"
            )
        if number == 0:
            line = strip_bom(line)
        yield line.decode(spec.encoding, "surrogateescape") + "\n"


def _bad_record(ordinal: int, detail: str, text: str | None) -> RowAction:
    return lambda b: b.reject(ordinal, "bad_csv", detail, None, text)


def _csv_places(header: list[str], spec: InputSpec, uri: str) -> list[int]:
    """Positions of the text, id (or -1) and kept columns.  Raises InputNotFoundError."""
    wanted = [spec.text, *([spec.id] if spec.id else []), *spec.keep]
    for name in wanted:
        if name not in header:
            raise missing_column(uri, name, header)
    return [header.index(name) for name in wanted]


def _csv_row(
    ordinal: int, record: list[str], width: int, places: list[int], line: int, spec: InputSpec
) -> RowAction:
    if len(record) != width:
        detail = f"line {line}: {len(record)} fields, the header has {width}"
        return _bad_record(ordinal, detail, ",".join(record))
    values = [record[place] for place in places]
    text, row_id = values[0], values[1] if spec.id else None
    kept: list[str | None] = [*values[2 if spec.id else 1 :]]

    def take(builder: RowBuilder) -> None:
        clean = text
        if any("\udc80" <= c <= "\udcff" for c in LONE_SURROGATE.findall(text)):
            decoded = builder.decode(ordinal, text.encode(spec.encoding, "surrogateescape"))
            if decoded is None:
                return
            clean = decoded
        if len(clean) > spec.max_row_bytes:
            builder.reject(ordinal, "row_too_large", _too_large(spec), row_id, clean)
            return
        shown = [None if value is None else printable(value) for value in kept]
        builder.add(ordinal, clean, row_id and printable(row_id), shown)

    return take


LINE_READERS: Mapping[str, Callable[[IO[bytes], Slice, InputSpec], Iterator[RowBatch]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
}


def check_line_columns(piece: Slice, spec: InputSpec, storage: StorageConfig) -> None:
    """Look at the head of a CSV or JSONL file.  Raises InputNotFoundError, UnreadableFileError."""
    batch = next(read_slice(piece, spec, storage), None)
    if batch is None or batch.texts or piece.file.format != "jsonl":
        return
    reasons = {reject.reason for reject in batch.rejects}
    if reasons == {"missing_text"}:
        sample = parse_json(batch.rejects[0].text or "{}") if _is_json(batch.rejects[0].text) else {}
        raise missing_column(piece.file.uri, spec.text, sample)


def _is_json(text: str | None) -> bool:
    try:
        return isinstance(parse_json(text or ""), dict)
    except ValueError:
        return False
