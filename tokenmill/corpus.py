"""Finding the corpus: which files a job's input names, and the shards they are cut into.

A shard is a fixed slice of the corpus. The same files and the same `input.shard_bytes` give the
same shards, whatever the number of workers. Reading rows is in `tokenmill.readers`.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from tokenmill.errors import ConfigError, InputNotFoundError
from tokenmill.job import InputSpec
from tokenmill.store import StorageConfig, is_local, mapped, open_filesystem

SUFFIXES: Mapping[str, str] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One input file as the listing shows it. `version` is the etag, or the mtime in ns."""

    uri: str
    size_bytes: int
    version: str
    format: str
    compression: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of one file: all of it, or a range of a Parquet file's row groups."""

    file: SourceFile
    first_group: int | None = None
    num_groups: int | None = None
    first_row: int = 0
    num_rows: int | None = None
    text_bytes: int

    def identity(self) -> dict[str, Any]:
        """What the shard key is made from: file, size, version and range."""
        groups = None if self.first_group is None else [self.first_group, self.num_groups]
        file = {"uri": self.file.uri, "size": self.file.size_bytes, "version": self.file.version}
        return {**file, "format": self.file.format, "row_groups": groups}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Slice:
        return cls(**{**data, "file": SourceFile(**data["file"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The files of a job's input in a fixed order, and what was passed over and why."""

    files: tuple[SourceFile, ...]
    skipped: Mapping[str, int]


def find_corpus(spec: InputSpec, storage: StorageConfig) -> Corpus:
    """List the input's files, sorted by name; each file once.

    Files that the user names are always read. In folders, files of unknown kinds and names that
    begin with "." or "_" are passed over and counted.
    Raises InputNotFoundError, or ConfigError for a file whose format cannot be told.
    """
    uris = [spec.uri] if isinstance(spec.uri, str) else spec.uri
    if not uris:
        raise InputNotFoundError("input.uri: an empty list; name at least one file or folder")
    files: dict[str, SourceFile] = {}
    skipped: Counter[str] = Counter()
    for uri in uris:
        found, passed_over = _expand(uri, spec.format, storage)
        files.update((file.uri, file) for file in found)
        skipped += passed_over
    if not files:
        raise InputNotFoundError(
            f"input.uri: no file that tokenmill reads in {', '.join(uris)}"
            f"{_tell(skipped)}; give a file, a glob or input.format"
        )
    return Corpus(files=tuple(files[uri] for uri in sorted(files)), skipped=dict(sorted(skipped.items())))


def _tell(skipped: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{n} {why}' for why, n in skipped.items())})" if skipped else ""


def _expand(uri: str, fmt: str, storage: StorageConfig) -> tuple[list[SourceFile], Counter[str]]:
    """Files that one entry of input.uri names. A name that exists is literal, never a glob."""
    fs, path = open_filesystem(uri, storage)
    with mapped(f"input.uri: listing {uri}"):
        info = _info(fs, path)
        if info is not None and info["type"] != "directory":
            return [_source_file(fs, info, fmt, uri)], Counter()
        if info is not None:
            return _from_folder(fs, fs.find(path, detail=True).values(), fmt, path)
        if any(mark in path for mark in "*?["):
            entries = [e for e in fs.glob(path, detail=True).values() if e["type"] != "directory"]
            if not entries:
                raise InputNotFoundError(f"input.uri: no file matches {uri}")
            return [_source_file(fs, entry, fmt, uri) for entry in entries], Counter()
    raise InputNotFoundError(f"input.uri: {uri} does not exist")


def _info(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any] | None:
    try:
        return fs.info(path)  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def _from_folder(
    fs: fsspec.AbstractFileSystem, entries: Iterable[dict[str, Any]], fmt: str, top: str
) -> tuple[list[SourceFile], Counter[str]]:
    files, skipped = [], Counter[str]()
    for entry in entries:
        inner = PurePosixPath(str(entry["name"]).removeprefix(top.rstrip("/") + "/"))
        if any(part[0] in "._" for part in inner.parts):
            skipped["hidden (name begins with . or _)"] += 1
        elif fmt == "auto" and _format_of(inner.name) is None:
            skipped["of unknown kind"] += 1
        else:
            files.append(_source_file(fs, entry, fmt, top))
    return files, skipped


def _format_of(name: str) -> str | None:
    suffixes = [s.lower() for s in PurePosixPath(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _source_file(
    fs: fsspec.AbstractFileSystem, entry: Mapping[str, Any], fmt: str, named_by: str
) -> SourceFile:
    path = str(entry["name"])
    actual = _format_of(path) if fmt == "auto" else fmt
    if actual is None:
        raise ConfigError(
            f"input.uri: cannot tell the format of {path} (named by {named_by}); "
            "set input.format to parquet, jsonl, csv or text"
        )
    local = is_local(fs)
    if local:
        stat = Path(path).stat()
        size, version = stat.st_size, f"mtime:{stat.st_mtime_ns}"
    else:
        size, version = int(entry["size"]), _remote_version(entry)
    return SourceFile(
        uri=os.path.abspath(path) if local else fs.unstrip_protocol(path),
        size_bytes=size,
        version=version,
        format=actual,
        compression=COMPRESSIONS.get(PurePosixPath(path).suffix.lower()) if actual != "parquet" else None,
    )


def _remote_version(entry: Mapping[str, Any]) -> str:
    for name in ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "mtime", "created"):
        if entry.get(name):
            return f"{name.lower()}:{str(entry[name]).strip(chr(34))}"
    return "unknown"


def check_readable(file: SourceFile) -> None:
    """Raises InputNotFoundError if a local file cannot be opened; remote ones were just listed."""
    if "://" in file.uri:
        return
    try:
        Path(file.uri).open("rb").close()
    except OSError as exc:
        raise InputNotFoundError(
            f"{file.uri}: cannot be read: {exc.strerror}; check its permissions"
        ) from exc


def group_slices(slices: Iterable[Slice], shard_bytes: int) -> Iterator[tuple[Slice, ...]]:
    """Cut the corpus into shards of about `shard_bytes` of text.

    A border depends only on the slices near it: among small files a shard also ends where a hash
    of the next name says so, so that a file added later moves few borders.
    """
    group: list[Slice] = []
    filled = 0
    for piece in slices:
        over = filled + piece.text_bytes > shard_bytes
        if group and (over or (filled * 4 >= shard_bytes and _is_border(piece))):
            yield tuple(group)
            group, filled = [], 0
        group.append(piece)
        filled += piece.text_bytes
    if group:
        yield tuple(group)


def _is_border(piece: Slice) -> bool:
    if piece.first_group:
        return False
    return hashlib.sha256(piece.file.uri.encode("utf-8", "surrogateescape")).digest()[0] < 16
