"""Storage: files appear whole or not at all, on local disk and on anything fsspec opens.

fsspec is the seam; tests use its memory file system and real servers. This module adds two
things: atomic publication and fresh listings. Foreign errors are mapped in `tokenmill.storage_errors`.
It does not know Parquet (see `tokenmill.parquet`) nor what the files mean.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tokenmill.errors import (
    ConfigError,
    OutputError,
    StoreUnavailableError,
)
from tokenmill.job import StorageSpec
from tokenmill.storage_errors import mapped
from tokenmill.uris import BUCKETS, CLOUDS, EXTRAS, PACKAGES, WEB, is_web, protocol_of

SCRATCH = ".tmp"
S3_ATTEMPTS, S3_CONNECT_S, S3_READ_S = 5, 20, 20
LITERAL = (*BUCKETS, *CLOUDS, "file", "local", "memory")
CUT_BY_S3FS = "?versionId="


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """How to open a bucket, secrets included. Runtime context: never stored, never printed."""

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_spec(cls, spec: StorageSpec) -> StorageConfig:
        """The settings of a job's storage section; keys come from the environment."""
        client = {"region_name": spec.region} if spec.region else {}
        options = {
            **({"endpoint_url": spec.endpoint_url} if spec.endpoint_url else {}),
            **({"client_kwargs": client} if client else {}),
            **({"anon": True} if spec.anon else {}),
        }
        return cls(options=options)


def open_filesystem(uri: str, config: StorageConfig) -> tuple[fsspec.AbstractFileSystem, str]:
    """File system and path of a URI, without any listing cache.  Raises ConfigError.

    Example: "s3://bucket/a#b.parquet" -> (S3FileSystem, "bucket/a#b.parquet"): keys are literal.
    """
    protocol = protocol_of(uri)
    _check_extra(uri, protocol)
    try:
        if protocol in WEB:
            from tokenmill.web import WebFiles

            return WebFiles(), uri
        if protocol not in LITERAL:
            return fsspec.core.url_to_fs(uri)  # type: ignore[no-any-return]
        # Subtle: url_to_fs takes "a::b" for a chain of file systems; here it is a name.
        fs = fsspec.filesystem(protocol, **_options(protocol, config))
        return fs, str(fs._strip_protocol(uri))
    except ImportError as exc:
        raise ConfigError(f"{uri}: cannot be opened: {exc}") from exc
    except ValueError as exc:
        known = ", ".join([*BUCKETS, *EXTRAS])
        raise ConfigError(
            f"{uri}: cannot be opened: {exc} (known: local paths, {known}, and what fsspec has)"
        ) from exc


def _check_extra(uri: str, protocol: str) -> None:
    """Raises ConfigError for a URI that needs a package which is not installed, or an account."""
    extra = EXTRAS.get(protocol)
    if extra and importlib.util.find_spec(PACKAGES[extra]) is None:
        raise ConfigError(f"{uri}: needs the {extra} extra: pip install 'tokenmill[{extra}]'")
    if extra == "azure" and "@" in uri.split("/")[2]:
        raise ConfigError(
            f"{uri}: write {protocol}://CONTAINER/PATH, and the account into AZURE_STORAGE_ACCOUNT_NAME"
        )


def _options(protocol: str, config: StorageConfig) -> dict[str, Any]:
    if protocol in CLOUDS:
        return {"use_listings_cache": False}
    if protocol not in BUCKETS:
        return {}
    # Subtle: "standard" waits between retries with jitter; the default of botocore gives up sooner.
    patience = {
        "retries": {"mode": "standard", "max_attempts": S3_ATTEMPTS},
        "connect_timeout": S3_CONNECT_S,
        "read_timeout": S3_READ_S,
    }
    fresh = {"use_listings_cache": False, "default_fill_cache": False, "config_kwargs": patience}
    return {**fresh, **config.options}


def check_key(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Raises ConfigError for a key that s3fs would cut: it would read and write another one."""
    if CUT_BY_S3FS in path and hasattr(fs, "call_s3"):
        raise ConfigError(f"{path}: s3fs cuts a key at {CUT_BY_S3FS!r}; choose another name")


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return isinstance(fs, LocalFileSystem)


@dataclass(frozen=True, slots=True)
class Store:
    """One output: names relative to a root folder or bucket prefix."""

    fs: fsspec.AbstractFileSystem
    root: str
    uri: str

    @classmethod
    def open(cls, uri: str, config: StorageConfig | None = None) -> Store:
        """Raises ConfigError for a URI that names no known kind of storage, a read-only one, or a key that
        s3fs cuts.
        """
        if is_web(uri):
            raise ConfigError(f"{uri}: HTTP can be read only; an output is a folder or in a bucket")
        fs, path = open_filesystem(uri, config or StorageConfig())
        check_key(fs, path)
        return cls(fs, path.rstrip("/"), uri.rstrip("/"))

    def check_writable(self) -> None:
        """Raises OutputError if a local output cannot be made. Writes nothing; remote ones pass."""
        if not is_local(self.fs):
            return
        folder = Path(self.root)
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise OutputError(f"output.uri: {self.uri}: {folder} is a file; choose another folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"output.uri: {self.uri}: {folder} is not writable; choose another folder")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Size in bytes of every file below a folder, by name relative to the root.

        One fresh listing; an absent folder is empty.
        """
        top = self.path(folder) if folder else self.root
        with mapped(f"listing {self.uri}/{folder}"):
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        skip = len(self.root) + 1
        sizes = {str(info["name"])[skip:]: int(info["size"]) for info in found.values()}
        return {name: size for name, size in sizes.items() if not _is_marker(name)}

    def open_file(self, name: str) -> IO[bytes]:
        """The file, for reading with seeks."""
        with mapped(f"opening {self.uri}/{name}"):
            return self.fs.open(self.path(name), "rb")  # type: ignore[no-any-return]

    def read_bytes(self, name: str) -> bytes:
        """Raises StoreError if it is not there."""
        with mapped(f"reading {self.uri}/{name}"):
            return self.fs.cat_file(self.path(name))  # type: ignore[no-any-return]

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents by name, read by several threads. Names are literal, never globs."""
        names = list(names)
        with ThreadPoolExecutor(max_workers=16) as pool:
            return dict(zip(names, pool.map(self.read_bytes, names), strict=True))

    @contextmanager
    def create(self, name: str) -> Iterator[Path]:
        """A local scratch file that becomes `name`, whole, when the block ends without an error.

        Local: flushed to disk and renamed.  Remote: uploaded by one put; a failed upload and an
        exception in the block leave no object.
        """
        scratch_dir = self._scratch_dir()
        scratch = scratch_dir / _scratch_name()
        with mapped(f"writing {self.uri}/{name}"):
            scratch_dir.mkdir(parents=True, exist_ok=True)
            try:
                yield scratch
                self._publish(scratch, name)
            finally:
                scratch.unlink(missing_ok=True)

    def _scratch_dir(self) -> Path:
        return Path(self.root) / SCRATCH if is_local(self.fs) else Path(tempfile.gettempdir())

    def _publish(self, scratch: Path, name: str) -> None:
        if not is_local(self.fs):
            self.fs.put_file(str(scratch), self.path(name))
            sent, arrived = scratch.stat().st_size, self._size_of(name)
            if sent != arrived:
                raise StoreUnavailableError(f"{self.uri}/{name}: {arrived or 0} of {sent} bytes arrived")
            return
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(target)
        _sync_folder(target.parent)

    def _size_of(self, name: str) -> int | None:
        try:
            return int(self.fs.info(self.path(name))["size"])
        except FileNotFoundError:
            return None

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace or create a file in one step."""
        with self.create(name) as scratch:
            scratch.write_bytes(data)

    def copy(self, source: str, target: str) -> None:
        """A second name for a finished file: a hard link where possible, else a copy."""
        with mapped(f"copying {self.uri}/{source}"):
            if not is_local(self.fs):
                self.fs.cp_file(self.path(source), self.path(target))  # copy() would expand globs
                return
        with self.create(target) as scratch:
            try:
                os.link(self.path(source), scratch)
            except OSError:  # a file system without links
                shutil.copyfile(self.path(source), scratch)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; one that is already gone is fine."""
        for name in names:
            with mapped(f"deleting {self.uri}/{name}"):
                try:
                    self.fs.rm_file(self.path(name))
                except FileNotFoundError:
                    continue

    def abort_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads below an S3 root that a killed run left, and that cost money; how many.

        Those that began longer ago than the limit.
        """
        if not hasattr(self.fs, "call_s3"):
            return 0
        bucket, prefix, _ = self.fs.split_path(f"{self.root}/")
        with mapped(f"listing uploads of {self.uri}"):
            found = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix).get("Uploads", [])
            now = datetime.now(UTC)
            stale = [up for up in found if (now - up["Initiated"]).total_seconds() >= older_than_s]
            for upload in stale:
                self.fs.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
        return len(stale)

    def clear_scratch(self, older_than_s: float) -> None:
        """Delete scratch files that a killed run left on this machine's disks.

        Those of this machine's processes that are gone; in a local output also any that is older than
        the limit. For a remote output they lie in the shared temporary folder; other users' files stay.
        """
        scratch_dir, local = self._scratch_dir(), is_local(self.fs)
        if not scratch_dir.is_dir():
            return
        let_be = (FileNotFoundError,) if local else (FileNotFoundError, PermissionError)
        with mapped(f"clearing {scratch_dir}"):
            now = _clock_of(scratch_dir)
            for path in scratch_dir.iterdir():
                with suppress(*let_be):
                    if _is_orphan(path.name) or (local and now - path.stat().st_mtime >= older_than_s):
                        path.unlink()


def _scratch_name() -> str:
    """Says whose it is. Example: "tokenmill-node7-4711-3f0c..."."""
    return f"{_own_prefix()}{uuid.uuid4().hex}"


def _own_prefix() -> str:
    """Of all scratch files of this process."""
    return f"tokenmill-{platform.node()}-{os.getpid()}-"


def _is_orphan(name: str) -> bool:
    """Whether a process of this machine made it that is not there any more."""
    owner, _, pid = name.rpartition("-")[0].rpartition("-")
    if owner != f"tokenmill-{platform.node()}" or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _is_marker(name: str) -> bool:
    """Scratch files, and the empty objects that S3's console makes for folders."""
    return name.startswith(f"{SCRATCH}/") or name.endswith("/") or not name


def _clock_of(folder: Path) -> float:
    """The file system's own time, which may differ from this machine's."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=_own_prefix()) as probe:
        return Path(probe.name).stat().st_mtime


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
