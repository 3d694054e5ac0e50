"""The one module that touches Parquet: writing parts, reading parts, reading footers.

Parts are written with zstd, page checksums and bounded row groups, so that any reader opens them
and a flipped bit is an error, never a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.errors import DataError, StoreError, UnreadableFileError
from tokenmill.storage_errors import mapped
from tokenmill.store import Store

ROW_GROUP_ROWS = 8192
ROW_GROUP_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """A finished file: what a receipt or manifest says of it."""

    path: str
    rows: int
    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PartWriter:
    """Cuts rows into row groups of bounded rows and bytes, however they arrive; counts them."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema, group_rows: int) -> None:
        self._writer, self._schema = writer, schema
        self._group_rows = max(1, min(group_rows, ROW_GROUP_BYTES // _fixed_row_bytes(schema)))
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = 0
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows; the schema must be the part's own."""
        while len(batch):
            piece = batch.slice(0, self._group_rows - self._pending_rows)
            batch = batch.slice(len(piece))
            self._pending.append(piece)
            self._pending_rows += len(piece)
            self._pending_bytes += piece.nbytes
            if self._pending_rows == self._group_rows or self._pending_bytes >= ROW_GROUP_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is buffered as one row group."""
        if self._pending:
            table = pa.Table.from_batches(self._pending, self._schema)
            self._writer.write_table(table, row_group_size=self._pending_rows)
        self.rows += self._pending_rows
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0


def _fixed_row_bytes(schema: pa.Schema) -> int:
    """Bytes of a row's vectors: the only columns that can make row groups too large by themselves."""
    vectors = [f.type for f in schema if _is_vector(f.type)]
    widths = [int(t.list_size) * int(t.value_type.bit_width) // 8 for t in vectors]
    return max(1, sum(widths))


def _is_vector(dtype: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(dtype) and bool(pa.types.is_floating(dtype.value_type))


class Part:
    """Handle of a part being written; `info` is there once the part is published."""

    def __init__(self, writer: PartWriter) -> None:
        self.write = writer.write
        self.info: FileInfo | None = None


@contextmanager
def create_part(
    store: Store,
    name: str,
    schema: pa.Schema,
    metadata: Mapping[str, str],
    group_rows: int = ROW_GROUP_ROWS,
) -> Iterator[Part]:
    """Write a Parquet file that appears whole under `name` when the block ends.

    metadata: put into the footer.  group_rows: most rows of a row group.
    Same rows and metadata give the same bytes.
    """
    schema = schema.with_metadata({f"tokenmill.{k}": v for k, v in sorted(metadata.items())})
    with store.create(name) as scratch:
        with _parquet_writer(scratch, schema) as raw:
            writer = PartWriter(raw, schema, group_rows)
            part = Part(writer)
            yield part
            writer.flush()
        info = FileInfo(path=name, rows=writer.rows, **_digest(scratch))
    part.info = info


def _parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Settings measured on real tokens and vectors: see docs/decisions.md, "Parquet"."""
    # Subtle: DuckDB does not read half floats that are split by bytes.
    floats = [
        f"{f.name}.list.element"
        for f in schema
        if _is_vector(f.type) and not pa.types.is_float16(f.type.value_type)
    ]
    plain = {f.name for f in schema if pa.types.is_nested(f.type)}
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=[f.name for f in schema if f.name not in plain],
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") or None,
        write_page_checksum=True,
        write_statistics=[f.name for f in schema if f.name not in plain],
        store_schema=True,
    )


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sha256_of(store: Store, name: str) -> str:
    """Checksum of a stored file, streamed."""
    with store.open_file(name) as file, mapped(f"reading {store.uri}/{name}"):
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def open_parquet(file: IO[bytes], what: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file with checksums verified.  Raises UnreadableFileError, naming `what`."""
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as exc:
        if is_of_storage(exc):
            raise
        raise UnreadableFileError(f"{what}: not a readable Parquet file: {exc}") from exc
    try:
        yield parquet
    except (pa.ArrowException, UnicodeDecodeError, OSError) as exc:
        if is_of_storage(exc):
            raise
        raise DataError(f"{what}: damaged: {exc}") from exc


def is_of_storage(exc: Exception) -> bool:
    """Whether reading bytes failed. Subtle: Arrow tells of damage by a plain OSError without errno."""
    return isinstance(exc, OSError) and not (type(exc) is OSError and exc.errno is None)


def iter_batches(
    file: IO[bytes],
    what: str,
    columns: Sequence[str] | None = None,
    row_groups: Sequence[int] | None = None,
    batch_rows: int = ROW_GROUP_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Rows of a Parquet file in order, a bounded number at a time."""
    with open_parquet(file, what) as parquet:
        yield from parquet.iter_batches(
            batch_size=batch_rows,
            row_groups=list(row_groups) if row_groups is not None else None,
            columns=list(columns) if columns is not None else None,
            use_threads=False,
        )


def iter_part(store: Store, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Rows of a stored part in order.  Raises DataError if it is damaged."""
    with store.open_file(name) as file, mapped(f"reading {store.uri}/{name}"):
        try:
            yield from iter_batches(file, f"{store.uri}/{name}", columns)
        except DataError as exc:
            raise DataError(f"{exc}; delete it and run again to redo its shard") from exc


def read_footer(file: IO[bytes], what: str) -> tuple[pa.Schema, pq.FileMetaData]:
    """Arrow schema and metadata of a Parquet file.  Raises UnreadableFileError."""
    with open_parquet(file, what) as parquet:
        return parquet.schema_arrow, parquet.metadata


def can_store(dtype: pa.DataType) -> bool:
    """Whether a Parquet file can hold a column of this type."""
    try:
        empty = pa.table({"column": pa.nulls(0, dtype)})
        pq.write_table(empty, pa.BufferOutputStream())
    except pa.ArrowNotImplementedError:
        return False
    return True


def part_footer(store: Store, name: str) -> tuple[pa.Schema, int]:
    """Schema and number of rows of a stored part.  Raises StoreError or DataError."""
    with store.open_file(name) as file, mapped(f"reading {store.uri}/{name}"):
        try:
            schema, metadata = read_footer(file, f"{store.uri}/{name}")
        except DataError as exc:
            raise DataError(f"{exc}; delete it and run again to redo its shard") from exc
    if schema.metadata is None:
        raise StoreError(f"{store.uri}/{name}: not written by tokenmill")
    return schema, metadata.num_rows
