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

from tokenmill.errors import ConfigError, InputNotFoundError, StoreError
from tokenmill.job import InputSpec
from tokenmill.partitions import is_partition
from tokenmill.storage_errors import mapped
from tokenmill.store import StorageConfig, check_key, is_local, open_filesystem
from tokenmill.uris import is_web, path_of

SUFFIXES: Mapping[str, str] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
TABLES = ("parquet", "arrow")
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
    """A part of one file: all of it, a range of a Parquet file's row groups, or one of whole lines."""

    file: SourceFile
    first_group: int | None = None
    num_groups: int | None = None
    first_byte: int | None = None
    num_bytes: int | None = None
    first_row: int = 0
    num_rows: int | None = None
    text_bytes: int

    def identity(self) -> dict[str, Any]:
        """What the shard key is made from: file, size, version and range."""
        groups = None if self.first_group is None else [self.first_group, self.num_groups]
        file = {"uri": self.file.uri, "size": self.file.size_bytes, "version": self.file.version}
        lines = None if self.first_byte is None else [self.first_byte, self.num_bytes]
        return {**file, "format": self.file.format, "row_groups": groups, "bytes": lines}

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

    Files that the user names are always read. In folders, names that begin with "." or "_" are passed
    over and counted; files of unknown kinds are so in globs too.
    Raises InputNotFoundError, or ConfigError for a file whose format cannot be told.
    """
    uris = spec.uris
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


def without_output(corpus: Corpus, output_uri: str) -> Corpus:
    """The corpus without files that the job itself wrote, where its output lies inside its input.

    Raises InputNotFoundError if nothing is left.
    """
    fs, path = open_filesystem(output_uri, StorageConfig())
    root = (os.path.abspath(path) if is_local(fs) else str(fs.unstrip_protocol(path))).rstrip("/") + "/"
    files = tuple(file for file in corpus.files if not file.uri.startswith(root))
    if not files:
        raise InputNotFoundError(f"input.uri: every file lies in the job's own output {output_uri}")
    num_own = len(corpus.files) - len(files)
    own = {"in the job's own output": num_own} if num_own else {}
    return Corpus(files=files, skipped={**corpus.skipped, **own})


def _tell(skipped: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{n} {why}' for why, n in skipped.items())})" if skipped else ""


def _expand(uri: str, fmt: str, storage: StorageConfig) -> tuple[list[SourceFile], Counter[str]]:
    """Files that one entry of input.uri names. A name that exists is literal, never a glob."""
    fs, path = open_filesystem(uri, storage)
    if is_web(uri):
        _refuse_listing(uri, fmt)
    check_key(fs, path)
    with mapped(f"input.uri: listing {uri}"):
        info = _info(fs, path)
        if info is not None and info["type"] != "directory":
            return [_source_file(fs, info, fmt, uri)], Counter()
        if info is not None:
            inside = _local_files(path) if is_local(fs) else fs.find(path, detail=True).values()
            return _from_folder(fs, inside, fmt, path)
        if any(mark in path for mark in "*?[") and not is_web(uri):
            entries = [e for e in fs.glob(path, detail=True).values() if not _is_folder(e)]
            if not entries:
                raise InputNotFoundError(f"input.uri: no file matches {uri}")
            known = [e for e in entries if fmt != "auto" or _format_of(str(e["name"]))]
            skipped = Counter({UNKNOWN_KIND: len(entries) - len(known)})
            return [_source_file(fs, entry, fmt, uri) for entry in known], +skipped
    raise InputNotFoundError(f"input.uri: {uri} does not exist")


def _refuse_listing(uri: str, fmt: str) -> None:
    """Raises ConfigError for a folder or glob behind HTTP: index pages are made for people."""
    path = path_of(uri)
    if any(mark in path for mark in "*[") or (fmt == "auto" and path.endswith("/")):
        raise ConfigError(f"input.uri: {uri}: HTTP has no listings of folders; name each file")


def _info(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any] | None:
    try:
        return fs.info(path)  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def _local_files(top: str) -> Iterator[dict[str, Any]]:
    """Everything below a folder but folders.  Raises InputNotFoundError for one that cannot be listed.

    Subtle: fsspec's find passes over folders that it may not list, without a word.
    """
    for folder, folders, names in os.walk(top, onerror=_cannot_list):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*names, *links):
            yield {"name": str(PurePosixPath(folder, name)), "type": "file"}


def _cannot_list(exc: OSError) -> None:
    raise InputNotFoundError(
        f"input.uri: {exc.filename}: cannot be listed: {exc.strerror}; check its permissions"
    ) from exc


UNKNOWN_KIND = "of unknown kind"
NO_FILE = "no file (a broken link, a linked folder or a pipe)"


def _is_folder(entry: Mapping[str, Any]) -> bool:
    """A folder, or the empty object that S3's console makes for one."""
    return entry["type"] == "directory" or str(entry["name"]).endswith("/")


def _from_folder(
    fs: fsspec.AbstractFileSystem, entries: Iterable[dict[str, Any]], fmt: str, top: str
) -> tuple[list[SourceFile], Counter[str]]:
    files, skipped = [], Counter[str]()
    for entry in entries:
        if _is_folder(entry):
            continue
        inner = PurePosixPath(str(entry["name"]).removeprefix(top.rstrip("/") + "/"))
        if _is_hidden(inner):
            skipped["hidden (name begins with . or _)"] += 1
        elif is_local(fs) and not Path(str(entry["name"])).is_file():
            skipped[NO_FILE] += 1
        elif fmt == "auto" and _format_of(inner.name) is None:
            skipped[UNKNOWN_KIND] += 1
        else:
            files.append(_source_file(fs, entry, fmt, top))
    return _without_sidecars(files, skipped) if fmt == "auto" else (files, skipped)


def _without_sidecars(
    files: list[SourceFile], skipped: Counter[str]
) -> tuple[list[SourceFile], Counter[str]]:
    """Without what tells of the tables in its folder: dataset_info.json, README.md, a cache of `datasets`."""
    folders = {_folder(file) for file in files if file.format in TABLES}
    kept = []
    for file in files:
        path = PurePosixPath(file.uri)
        if file.format == "arrow" and path.name.startswith("cache-"):
            skipped["cache of datasets (cache-*.arrow)"] += 1
        elif _folder(file) in folders and path.suffix.lower() in SIDECARS:
            skipped["beside tables (.json or .md)"] += 1
        else:
            kept.append(file)
    return kept, skipped


def _folder(file: SourceFile) -> str:
    return file.uri.rpartition("/")[0]


SIDECARS = (".json", ".md")


def _is_hidden(inner: PurePosixPath) -> bool:
    """Subtle: a partition's column may begin with "_", as in _year=2020/."""
    folders = [folder for folder in inner.parts[:-1] if not is_partition(folder)]
    return any(part[0] in "._" for part in (*folders, inner.name))


def kind_suffix(name: str) -> str:
    """Lower-case suffix of a file's name, that of a compression left out; "" if it has none.

    Example: "dir/a.TSV.gz" -> ".tsv"
    """
    suffixes = [s.lower() for s in PurePosixPath(path_of(name)).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _format_of(name: str) -> str | None:
    return SUFFIXES.get(kind_suffix(name))


def _source_file(
    fs: fsspec.AbstractFileSystem, entry: Mapping[str, Any], fmt: str, named_by: str
) -> SourceFile:
    path = str(entry["name"])
    check_key(fs, path)
    actual = _format_of(path) if fmt == "auto" else fmt
    if actual is None:
        raise ConfigError(
            f"input.uri: cannot tell the format of {path} (named by {named_by}); "
            "set input.format to parquet, arrow, jsonl, csv or text"
        )
    size, version = size_and_version(fs, entry)
    suffix = PurePosixPath(path_of(path)).suffix.lower()
    return SourceFile(
        uri=os.path.abspath(path) if is_local(fs) else fs.unstrip_protocol(path),
        size_bytes=size,
        version=version,
        format=actual,
        compression=COMPRESSIONS.get(suffix) if actual not in TABLES else None,
    )


def size_and_version(fs: fsspec.AbstractFileSystem, entry: Mapping[str, Any]) -> tuple[int, str]:
    """What tells one content of a file from the next: size, and etag or mtime."""
    if is_local(fs):
        stat = Path(str(entry["name"])).stat()
        return stat.st_size, f"mtime:{stat.st_mtime_ns}"
    if entry["size"] is None:
        raise StoreError(f"{entry['name']}: the server does not tell its size; download the file and name it")
    return int(entry["size"]), _remote_version(entry)


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
    if piece.first_group or piece.first_byte:
        return False
    return hashlib.sha256(piece.file.uri.encode("utf-8", "surrogateescape")).digest()[0] < 16
