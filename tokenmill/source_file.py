"""Opening an input file: every byte that is read is of the planned version, and none is missing.

    opened -> held against the plan -> read -> held against the plan again

On S3 each request names the ETag that the file was opened with, but not every server heeds that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import fsspec

from tokenmill.corpus import SourceFile, size_and_version
from tokenmill.errors import DataError, StoreUnavailableError
from tokenmill.storage_errors import mapped
from tokenmill.store import StorageConfig, is_local, open_filesystem


@contextmanager
def open_source(
    source: SourceFile, storage: StorageConfig, block_bytes: int | None = None
) -> Iterator[IO[bytes]]:
    """The file, for reading with seeks.

    block_bytes: what is fetched ahead of a read. Default: the file system's own.
    Raises DataError if it was replaced since the job was planned, StoreError for failing storage, and
    StoreUnavailableError where fewer bytes come than it holds.
    """
    fs, path = open_filesystem(source.uri, storage)
    ahead = {} if block_bytes is None else {"block_size": block_bytes}
    with mapped(f"reading {source.uri}"), fs.open(path, "rb", **ahead) as file:
        _check_unchanged(source, *_opened_version(fs, file, path))
        yield cast("IO[bytes]", WholeFile(file, source))
        _check_unchanged(source, *_version_now(fs, file, path))


class WholeFile:
    """A file whose end comes at the planned size: an earlier one is an error, never fewer rows."""

    def __init__(self, file: IO[bytes], source: SourceFile) -> None:
        self._file, self._source = file, source

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as asked for, up to the planned size.  Raises StoreUnavailableError."""
        start, total = self._file.tell(), self._source.size_bytes
        left = max(0, total - start)
        wanted = left if size is None or size < 0 else min(size, left)
        data = self._file.read(wanted)
        while len(data) < wanted:
            more = self._file.read(wanted - len(data))
            if not more:
                raise StoreUnavailableError(
                    f"reading {self._source.uri}: {start + len(data)} of {total} bytes came"
                )
            data += more
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _check_unchanged(planned: SourceFile, size: int, version: str) -> None:
    same_kind = version.split(":")[0] == planned.version.split(":")[0]
    if size != planned.size_bytes or (same_kind and version != planned.version):
        raise DataError(
            f"{planned.uri}: changed while the job ran ({planned.size_bytes} bytes and {planned.version} "
            f"when planned, {size} bytes and {version} now); run the job again"
        )


def _opened_version(fs: fsspec.AbstractFileSystem, file: Any, path: str) -> tuple[int, str]:
    """Size and version of what was opened. Subtle: a request before it might see an older version."""
    details = None if is_local(fs) else getattr(file, "details", None)
    return size_and_version(fs, details) if details else _version_now(fs, file, path)


def _version_now(fs: fsspec.AbstractFileSystem, file: Any, path: str) -> tuple[int, str]:
    if is_local(fs):
        stat = os.fstat(file.fileno())
        return stat.st_size, f"mtime:{stat.st_mtime_ns}"
    fs.invalidate_cache()
    return size_and_version(fs, fs.info(path))
