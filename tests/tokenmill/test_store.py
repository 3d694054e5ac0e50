"""Storage: files appear whole or not at all, and foreign errors become ours by one table."""
# ruff: noqa: PT012 (what happens when a block fails is the subject)

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import aiohttp
import botocore.exceptions
import fsspec
import pytest
from s3fs.errors import ERROR_CODE_TO_EXCEPTION, translate_boto_error

from tokenmill.errors import ConfigError, OutputError, StoreError, StoreUnavailableError
from tokenmill.storage_errors import is_storage_error, map_error, mapped
from tokenmill.store import StorageConfig, Store, open_filesystem


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store.open(str(tmp_path / "out"))
    return Store.open(f"memory://store-{uuid.uuid4().hex}/out")


def test_a_file_is_there_with_its_content_after_the_block(store: Store) -> None:
    with store.create("a/b.bin") as scratch:
        scratch.write_bytes(b"content")
        assert store.sizes() == {}
    assert store.sizes() == {"a/b.bin": 7}
    assert store.read_bytes("a/b.bin") == b"content"
    with store.open_file("a/b.bin") as file:
        file.seek(3)
        assert file.read() == b"tent"


def test_an_error_in_the_block_leaves_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.create("a.bin") as scratch:
        scratch.write_bytes(b"half")
        raise ZeroDivisionError
    assert store.sizes() == {}
    assert not scratch.exists()


def test_an_error_in_the_block_leaves_the_old_file(store: Store) -> None:
    store.write_bytes("a.bin", b"old")
    with pytest.raises(KeyboardInterrupt), store.create("a.bin") as scratch:
        scratch.write_bytes(b"new")
        raise KeyboardInterrupt
    assert store.read_bytes("a.bin") == b"old"
    assert not scratch.exists()


def test_a_failed_publication_leaves_nothing_and_is_a_store_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(type(store.fs), "put_file", fail, raising=False)
    with pytest.raises(StoreError, match="the disk is full; free some space"):
        store.write_bytes("a.bin", b"x")
    monkeypatch.undo()
    assert store.sizes() == {}


def test_a_file_is_replaced_in_one_step(store: Store) -> None:
    store.write_bytes("a.bin", b"old")
    store.write_bytes("a.bin", b"new one")
    assert store.read_bytes("a.bin") == b"new one"
    assert store.sizes() == {"a.bin": 7}


@pytest.mark.parametrize(
    "name", ["a[1].bin", "a*.bin", "what?.bin", "x y.bin", "a#1.bin", "100%20.bin", "a::b"]
)
def test_names_are_literal(store: Store, name: str) -> None:
    store.write_bytes("a1.bin", b"other")
    store.write_bytes(name, b"x")
    store.copy(name, f"copy of {name}")
    assert store.read_many([name, f"copy of {name}"]) == {name: b"x", f"copy of {name}": b"x"}
    assert store.sizes() == {"a1.bin": 5, name: 1, f"copy of {name}": 1}
    store.remove([name])
    assert set(store.sizes()) == {"a1.bin", f"copy of {name}"}


def test_a_root_with_glob_characters_is_literal(tmp_path: Path) -> None:
    for root in [str(tmp_path / "out[1]*"), f"memory://glob-{uuid.uuid4().hex}/out[1]*"]:
        store = Store.open(root)
        store.write_bytes("a/b", b"x")
        store.copy("a/b", "c")
        assert store.sizes() == {"a/b": 1, "c": 1}


def test_listings_are_of_one_folder_or_file_and_never_stale(store: Store) -> None:
    assert store.sizes("parts") == {}
    store.write_bytes("parts/a", b"1")
    store.write_bytes("parts2/b", b"22")
    assert store.sizes("parts") == {"parts/a": 1}
    assert store.sizes("parts2/b") == {"parts2/b": 2}
    assert store.sizes("parts2/no") == {}
    other = Store.open(store.uri)
    other.write_bytes("parts/c", b"333")
    assert store.sizes("parts") == {"parts/a": 1, "parts/c": 3}


def test_what_is_missing_is_an_error_and_removing_it_is_not(store: Store) -> None:
    with pytest.raises(StoreError, match=r"reading .*/nothing: FileNotFoundError") as caught:
        store.read_bytes("nothing")
    assert not isinstance(caught.value, StoreUnavailableError)
    with pytest.raises(StoreError, match="opening"):
        store.open_file("nothing").read()
    store.remove(["nothing"])


def test_a_copy_outlives_its_source(store: Store) -> None:
    store.write_bytes("a", b"x")
    store.copy("a", "deep/b")
    store.write_bytes("a", b"changed")
    store.remove(["a"])
    assert store.read_bytes("deep/b") == b"x"


def test_a_copy_works_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = Store.open(str(tmp_path))
    store.write_bytes("a", b"x")
    store.copy("a", "b")
    assert store.read_bytes("b") == b"x"


def test_only_old_scratch_files_of_killed_runs_are_cleared(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    scratch = tmp_path / ".tmp"
    scratch.mkdir()
    (scratch / "old").write_bytes(b"x")
    (scratch / "young").write_bytes(b"x")
    os.utime(scratch / "old", (0, 0))
    store.clear_scratch(3600)
    assert [path.name for path in scratch.iterdir()] == ["young"]
    assert store.sizes() == {}
    store.clear_scratch(0)
    assert list(scratch.iterdir()) == []


def test_scratch_files_of_processes_that_are_gone_are_cleared_at_once(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    killed = "with Store.open(sys.argv[1]).create('a') as path: path.touch(); os._exit(9)"
    write = f"import os, sys; from tokenmill.store import Store\n{killed}"
    subprocess.run([sys.executable, "-c", write, str(tmp_path)], check=False)
    with store.create("mine") as mine:
        mine.write_bytes(b"x")
        assert len(list((tmp_path / ".tmp").iterdir())) == 2
        store.clear_scratch(3600)
        assert list((tmp_path / ".tmp").iterdir()) == [mine]
    assert store.sizes() == {"mine": 1}


def test_scratch_files_for_a_remote_output_are_cleared_when_their_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "someone-elses").write_bytes(b"x")
    killed = "with Store.open('memory://out').create('a') as path: path.touch(); os._exit(9)"
    write = f"import os; from tokenmill.store import Store\n{killed}"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", write], env=environment, check=False)
    store = Store.open(f"memory://store-{uuid.uuid4().hex}/out")
    with store.create("mine") as mine:
        mine.write_bytes(b"x")
        assert len(list(tmp_path.iterdir())) == 3
        store.clear_scratch(0)
        assert {path.name for path in tmp_path.iterdir()} == {"someone-elses", mine.name}


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("memory://b/a#b%20 c?.parquet", "/b/a#b%20 c?.parquet"),
        ("/x/a::b", "/x/a::b"),
        ("file:///x/a%20b", "/x/a%20b"),
        ("/x/y/", "/x/y"),
    ],
)
def test_paths_are_literal(uri: str, path: str) -> None:
    assert open_filesystem(uri, StorageConfig())[1] == path


def test_bucket_keys_are_literal_and_listings_are_not_cached() -> None:
    fs, path = open_filesystem("s3://bucket/a::b #%2F.parquet", StorageConfig(options={"anon": True}))
    assert path == "bucket/a::b #%2F.parquet"
    assert fs.anon is True
    assert fs.dircache.use_listings_cache is False


def test_an_unknown_kind_of_storage_is_a_mistake_in_the_job() -> None:
    with pytest.raises(ConfigError, match=r"nowhere://x: cannot be opened: .*\(known: local paths, s3, .*gs"):
        Store.open("nowhere://x")


@pytest.mark.parametrize(
    ("uri", "extra", "module"),
    [
        ("gs://bucket/x", "gcs", "gcsfs"),
        ("gcs://bucket/x", "gcs", "gcsfs"),
        ("az://box/x", "azure", "adlfs"),
        ("abfs://box/x", "azure", "adlfs"),
        ("abfss://box/x", "azure", "adlfs"),
        ("http://host/x", "http", "aiohttp"),
        ("https://host/x", "http", "aiohttp"),
    ],
)
def test_a_missing_package_is_named_by_its_extra(
    uri: str, extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        open_filesystem(uri, StorageConfig())
    assert str(caught.value) == f"{uri}: needs the {extra} extra: pip install 'tokenmill[{extra}]'"


class CloudFiles(fsspec.AbstractFileSystem):
    """Stands for gcsfs and adlfs."""

    protocol = ("gs", "gcs", "az", "abfs", "abfss")


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the packages were installed."""
    monkeypatch.setitem(sys.modules, "gcsfs", fsspec)
    monkeypatch.setitem(sys.modules, "adlfs", fsspec)
    monkeypatch.setattr(fsspec, "filesystem", lambda protocol, **options: CloudFiles(**options))


@pytest.mark.usefixtures("clouds")
@pytest.mark.parametrize("protocol", CloudFiles.protocol)
def test_clouds_are_opened_without_listing_caches_and_names_are_literal(protocol: str) -> None:
    fs, path = open_filesystem(f"{protocol}://b/a::b#1", StorageConfig())
    assert (path, fs.storage_options) == ("b/a::b#1", {"use_listings_cache": False})


@pytest.mark.usefixtures("clouds")
def test_the_account_of_azure_is_not_part_of_a_uri() -> None:
    with pytest.raises(
        ConfigError, match=r"write abfss://CONTAINER/PATH, and the account into AZURE_STORAGE"
    ):
        open_filesystem("abfss://box@account.example/x", StorageConfig())


def test_an_output_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in ("file", "file/out"):
        with pytest.raises(OutputError, match=r"output\.uri: .*file is a file; choose another folder"):
            Store.open(str(tmp_path / root)).check_writable()
    Store.open(str(tmp_path / "new" / "out")).check_writable()
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def client_error(code: str) -> Exception:
    return botocore.exceptions.ClientError({"Error": {"Code": code, "Message": "m"}}, "GetObject")


TRANSIENT = [
    ConnectionResetError("x"),
    TimeoutError("x"),
    BrokenPipeError("x"),
    OSError(errno.EBUSY, "x"),
    OSError(errno.EIO, "x"),
    OSError(errno.ETIMEDOUT, "x"),
    fsspec.exceptions.FSTimeoutError(),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError(),
    botocore.exceptions.EndpointConnectionError(endpoint_url="x"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="x"),
    botocore.exceptions.ConnectTimeoutError(endpoint_url="x"),
    botocore.exceptions.ConnectionClosedError(endpoint_url="x"),
    botocore.exceptions.ResponseStreamingError(error="x"),
    *(
        translate_boto_error(client_error(code))
        for code in ("SlowDown", "503", "ServiceUnavailable", "InternalError", "500", "RequestTimeout", "502")
    ),
]
LASTING = [
    FileNotFoundError("x"),
    PermissionError("x"),
    IsADirectoryError("x"),
    OSError(errno.ENOTEMPTY, "x"),
    OSError("no number"),
    client_error("AccessDenied"),
    botocore.exceptions.NoCredentialsError(),
    *(translate_boto_error(client_error(code)) for code in ("AccessDenied", "NoSuchBucket", "InvalidRange")),
]


@pytest.mark.parametrize("exc", TRANSIENT, ids=repr)
def test_what_may_pass_is_unavailable(exc: Exception) -> None:
    error = map_error(exc, "reading x")
    assert type(error) is StoreUnavailableError
    assert str(error).startswith(f"reading x: {type(exc).__name__}: ")
    assert is_storage_error(exc)


@pytest.mark.parametrize("exc", LASTING, ids=repr)
def test_what_will_not_pass_is_not_retried(exc: Exception) -> None:
    assert type(map_error(exc, "reading x")) is StoreError
    assert is_storage_error(exc)


def foreign(module: str, name: str, **told: object) -> Exception:
    """An error of a library that is not installed here."""
    return type(name, (Exception,), {"__module__": module, **told})("text")


@pytest.mark.parametrize(
    ("exc", "kind", "message"),
    [
        (foreign("azure.core.exceptions", "ServiceRequestError"), StoreUnavailableError, "ServiceRequestErr"),
        (foreign("google.auth.exceptions", "TransportError"), StoreUnavailableError, "TransportError: text"),
        (
            foreign("gcsfs.retry", "HttpError", code=503, message="busy"),
            StoreUnavailableError,
            "HTTP 503 busy",
        ),
        (foreign("gcsfs.retry", "HttpError", code=400, message="bad"), StoreError, "HTTP 400 bad"),
        (
            foreign("azure.core.exceptions", "HttpResponseError", status_code=503, message="busy\nRequestId"),
            StoreUnavailableError,
            "HTTP 503 busy",
        ),
        (
            foreign("azure.core.exceptions", "ClientAuthenticationError", status_code=403, message="no"),
            StoreError,
            r"access is refused \(HTTP 403\); check the credentials and rights",
        ),
        (foreign("google.auth.exceptions", "DefaultCredentialsError"), StoreError, "CredentialsError: text"),
    ],
)
def test_errors_of_other_clouds_have_a_place_in_the_table(
    exc: Exception, kind: type[Exception], message: str
) -> None:
    with pytest.raises(StoreError, match=f"reading x: .*{message}") as caught, mapped("reading x"):
        raise exc
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", sorted(ERROR_CODE_TO_EXCEPTION))
def test_every_error_code_of_s3_has_a_place_in_the_table(code: str) -> None:
    error = map_error(translate_boto_error(client_error(code)), "x")
    busy = {"503", "500", "409", "SlowDown", "ServiceUnavailable", "InternalError", "OperationAborted"}
    renewed = {"ExpiredToken", "TokenRefreshRequired", "400"}
    may_pass = code in {*busy, *renewed, "RequestTimeout", "RestoreAlreadyInProgress"}
    assert isinstance(error, StoreUnavailableError) == may_pass


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("403", "x: the storage refuses the credentials (403); check key, secret, rights and this mach"),
        ("400", "x: the credentials have expired or the region is wrong (400); renew them and run again: "),
    ],
)
def test_an_answer_without_a_reason_says_what_to_look_at(code: str, told: str) -> None:
    assert str(map_error(translate_boto_error(client_error(code)), "x")).startswith(told)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_to_do(number: int) -> None:
    assert str(map_error(OSError(number, "x"), "writing x")) == (
        "writing x: the disk is full; free some space and run again"
    )


def test_defects_are_not_taken_for_storage_errors() -> None:
    assert not is_storage_error(ValueError("x"))
    with pytest.raises(KeyError), mapped("reading x"):
        raise KeyError("x")
    known = ConfigError("x")
    with pytest.raises(ConfigError) as caught, mapped("reading x"):
        raise known
    assert caught.value is known
    assert map_error(known, "y") is known


def test_secrets_are_not_printed() -> None:
    assert "hunter2" not in repr(StorageConfig(options={"secret": "hunter2"}))
