"""Arrow IPC, as a file (Feather too) or a stream (as Hugging Face datasets are saved on disk)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa

from tokenmill.errors import DataError, UnreadableFileError
from tokenmill.parquet import is_of_storage

FILE_MAGIC = b"ARROW1"


def read_schema(file: IO[bytes], what: str) -> pa.Schema:
    """Raises UnreadableFileError, naming `what`."""
    with _opened(file, what) as reader:
        schema: pa.Schema = reader.schema
        return schema


def iter_ipc(file: IO[bytes], what: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Rows in order, at most batch_rows at a time.  Raises UnreadableFileError, DataError."""
    with _opened(file, what) as reader:
        for batch in _batches(reader, what):
            for start in range(0, len(batch), batch_rows):
                yield batch.slice(start, batch_rows)


@contextmanager
def _opened(file: IO[bytes], what: str) -> Iterator[Any]:
    head = file.read(len(FILE_MAGIC))
    file.seek(0)
    try:
        reader = pa.ipc.open_file(file) if head == FILE_MAGIC else pa.ipc.open_stream(file)
    except pa.ArrowException as exc:
        raise UnreadableFileError(f"{what}: not a readable Arrow IPC file: {exc}") from exc
    with reader:
        yield reader


def _batches(reader: Any, what: str) -> Iterator[pa.RecordBatch]:
    try:
        if isinstance(reader, pa.RecordBatchFileReader):
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader
    except (pa.ArrowException, EOFError, OSError) as exc:
        if is_of_storage(exc):
            raise
        raise DataError(f"{what}: damaged: {exc}") from exc
