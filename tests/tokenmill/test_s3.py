"""The same job on S3: same rows, same vectors, nothing done twice, keys literal.

Against moto, and against Ceph's RADOS Gateway where the tests that need a real server are asked for.
"""
# ruff: noqa: PT012 (what happens when a block fails is the subject)

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from botocore.exceptions import ClientError
from buckets import BUCKET, FILES, ODD_MARKS, empty_bucket, job_at, keys, rows_of, store_of
from moto.server import ThreadedMotoServer
from outputs import jsonl, published, published_bytes, run_fake, write_files
from s3fs.errors import translate_boto_error

from tokenmill.corpus import find_corpus
from tokenmill.errors import ConfigError, InputNotFoundError, OutputError, StoreError, StoreUnavailableError
from tokenmill.job import InputSpec, Job
from tokenmill.report import rebuild
from tokenmill.store import StorageConfig, Store
from tokenmill.testing import FakeBackend, make_job
from tokenmill.verify import verify


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """A server of this process that speaks S3, on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture(scope="module", params=["moto", pytest.param("ceph", marks=pytest.mark.service)])
def endpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client with an empty bucket; credentials come from the environment, as they would."""
    with empty_bucket(endpoint, monkeypatch) as client:
        yield client


@pytest.fixture
def job(tmp_path: Path, s3: Any, endpoint: str) -> Job:
    for name, content in FILES.items():
        s3.put_object(Bucket=BUCKET, Key=f"in/{name}", Body=content.encode())
    for marker in ("in/", "in/c d/", "out #1%20/"):  # as S3's console makes folders
        s3.put_object(Bucket=BUCKET, Key=marker, Body=b"")
    s3.put_object(Bucket=BUCKET, Key="in/_SUCCESS", Body=b"")
    return job_at(tmp_path, {"endpoint_url": endpoint}, f"s3://{BUCKET}/in/", f"s3://{BUCKET}/out #1%20/")


def test_a_job_on_s3_gives_what_it_gives_on_disk(tmp_path: Path, job: Job, s3: Any) -> None:
    manifest = run_fake(job)
    write_files(tmp_path, FILES)
    local = job_at(tmp_path, None, str(tmp_path / "in"), str(tmp_path / "out"))
    beside = run_fake(local)
    assert manifest.counts == beside.counts
    remote_rows, local_rows = rows_of(job), published(local)
    names = [row.pop("source_file") for row in remote_rows]
    assert names == [row.pop("source_file").replace(str(tmp_path), f"s3://{BUCKET}") for row in local_rows]
    assert remote_rows == local_rows
    remote_report, local_report = rebuild(store_of(job)), rebuild(store_of(local))
    for part in ("counts", "rates", "lengths", "state"):
        assert remote_report[part] == local_report[part]
    folders = {"groups", "parts", "receipts", "rejects", "report", "results", "tokens"}
    for store in (store_of(job), store_of(local)):
        found = {name.partition("/")[0] for name in store.sizes()}
        assert found == {*folders, "job.json", "manifest.json"}
    verdict = verify(store_of(job))
    assert (verdict.problems, verdict.published, verdict.num_done) == ((), True, 3)
    assert all(key.startswith(("in/", "out #1%20/")) for key in keys(s3))


def test_a_second_run_on_s3_does_no_work_and_writes_nothing(job: Job, s3: Any) -> None:
    manifest = run_fake(job)
    before = s3.list_objects_v2(Bucket=BUCKET)["Contents"]
    backend = FakeBackend(failures=10**6)
    assert run_fake(job, backend) == manifest
    assert backend.failures == 10**6
    assert s3.list_objects_v2(Bucket=BUCKET)["Contents"] == before


def test_what_is_lost_on_s3_is_made_again(job: Job, s3: Any) -> None:
    run_fake(job)
    store = store_of(job)
    before = {name: store.read_bytes(name) for name in store.sizes() if not name.startswith("receipts/")}
    for prefix in ("parts/", "results/", "receipts/infer-"):
        lost = next(key for key in keys(s3) if key.startswith(f"out #1%20/{prefix}"))
        s3.delete_object(Bucket=BUCKET, Key=lost)
    run_fake(job)
    assert {name: store.read_bytes(name) for name in before} == before
    assert verify(store).problems == ()


def test_an_object_that_changed_is_done_again_and_only_it(job: Job, s3: Any) -> None:
    run_fake(job)
    s3.put_object(
        Bucket=BUCKET, Key="in/a#1.jsonl", Body=jsonl([{"text": "changed text", "k": "n"}]).encode()
    )
    backend = FakeBackend()
    run_fake(job, backend)
    assert backend.shapes == [(1, 4)]
    assert verify(store_of(job)).problems == ()


def test_keys_are_literal_and_folder_markers_are_no_files(job: Job, endpoint: str) -> None:
    config = StorageConfig.from_spec(job.input.storage)
    corpus = find_corpus(job.input, config)
    assert [file.uri.removeprefix(f"s3://{BUCKET}/in/") for file in corpus.files] == sorted(FILES)
    assert corpus.skipped == {"hidden (name begins with . or _)": 1}
    for name in FILES:
        (only,) = find_corpus(InputSpec(uri=f"s3://{BUCKET}/in/{name}"), config).files
        assert only.uri == f"s3://{BUCKET}/in/{name}"
        assert only.version.startswith("etag:")
    globbed = find_corpus(InputSpec(uri=f"s3://{BUCKET}/in/*.csv"), config).files
    assert [file.uri for file in globbed] == [f"s3://{BUCKET}/in/b%2F c+d.csv"]
    everything = find_corpus(InputSpec(uri=f"s3://{BUCKET}/in/**"), config)
    assert everything.files == corpus.files
    assert everything.skipped == {"of unknown kind": 1}


@pytest.mark.parametrize("mark", ODD_MARKS)
def test_a_key_is_literal_in_input_and_output(s3: Any, endpoint: str, mark: str) -> None:
    config = StorageConfig(options={"endpoint_url": endpoint})
    folder, name = f"in{mark}a", f"b{mark}c.jsonl"
    neighbours = ["inXa/bXc.jsonl", "ina/bc.jsonl"]
    for key in (f"{folder}/{name}", *neighbours):
        s3.put_object(Bucket=BUCKET, Key=key, Body=jsonl([key]).encode())
    for uri in (f"s3://{BUCKET}/{folder}/{name}", f"s3://{BUCKET}/{folder}/"):
        (file,) = find_corpus(InputSpec(uri=uri), config).files
        assert file.uri == f"s3://{BUCKET}/{folder}/{name}"
    store = Store.open(f"s3://{BUCKET}/out{mark}a/{mark}", config)
    store.write_bytes(name, b"x")
    store.copy(name, f"{mark}/{name}")
    written = {name: 1, f"{mark}/{name}": 1}
    assert store.sizes() == written
    assert store.read_many(written) == dict.fromkeys(written, b"x")
    root = f"out{mark}a/{mark}"
    assert keys(s3) == sorted([*neighbours, f"{folder}/{name}", *(f"{root}/{key}" for key in written)])
    store.remove(written)
    assert keys(s3) == sorted([*neighbours, f"{folder}/{name}"])


def test_a_job_reads_and_writes_odd_keys(tmp_path: Path, s3: Any, endpoint: str) -> None:
    names = {mark: f"in{mark}a/b{mark}c.jsonl" for mark in ODD_MARKS}
    for mark, name in names.items():
        s3.put_object(Bucket=BUCKET, Key=name, Body=jsonl([{"text": "one two", "k": mark}]).encode())
    root = "".join(ODD_MARKS)
    job = job_at(
        tmp_path,
        {"endpoint_url": endpoint},
        [f"s3://{BUCKET}/{name}" for name in names.values()],
        f"s3://{BUCKET}/{root}",
        shard_bytes=1000,
    )
    manifest = run_fake(job)
    found = {row["k"]: row["source_file"] for row in rows_of(job)}
    assert found == {mark: f"s3://{BUCKET}/{name}" for mark, name in names.items()}
    assert verify(store_of(job)).problems == ()
    assert set(keys(s3)) >= {f"{root}/{file.path}" for file in manifest.files()}
    assert all(key in names.values() or key.startswith(f"{root}/") for key in keys(s3))


def test_a_key_that_s3fs_would_cut_is_refused(s3: Any, endpoint: str) -> None:
    config = StorageConfig(options={"endpoint_url": endpoint})
    for key in ("in/a.jsonl", "in/a.jsonl?versionId=1.jsonl"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=jsonl([key]).encode())
    for uri in ("in/", "in/a.jsonl?versionId=1.jsonl", "in/*.jsonl"):
        with pytest.raises(ConfigError, match=r"in/a\.jsonl\?versionId=1\.jsonl: s3fs cuts a key at"):
            find_corpus(InputSpec(uri=f"s3://{BUCKET}/{uri}"), config)
    with pytest.raises(ConfigError, match="s3fs cuts a key at"):
        Store.open(f"s3://{BUCKET}/out?versionId=1", config)


def test_listings_on_s3_are_never_stale(job: Job, s3: Any) -> None:
    store = store_of(job)
    assert store.sizes() == {}
    s3.put_object(Bucket=BUCKET, Key="out #1%20/x", Body=b"123")
    assert store.sizes() == store.sizes("x") == {"x": 3}
    s3.put_object(Bucket=BUCKET, Key="out #1%20/x", Body=b"12345")
    assert store.sizes() == {"x": 5}
    assert store.read_bytes("x") == b"12345"
    s3.put_object(Bucket=BUCKET, Key="out #1%20/x", Body=b"9")
    assert store.open_file("x").read() == b"9"
    assert store.sizes("nothing") == {}


def test_a_failed_write_leaves_no_object(job: Job, s3: Any) -> None:
    store = store_of(job)
    with pytest.raises(ZeroDivisionError), store.create("a") as scratch:
        scratch.write_bytes(b"half")
        raise ZeroDivisionError
    assert store.sizes() == {}
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=BUCKET)


def test_what_is_not_there_on_s3_is_named(tmp_path: Path, job: Job, endpoint: str) -> None:
    config = StorageConfig.from_spec(job.input.storage)
    for uri in ("s3://no-such-bucket/x", f"s3://{BUCKET}/nothing/"):
        with pytest.raises(InputNotFoundError, match=f"{uri} does not exist"):
            find_corpus(InputSpec(uri=uri), config)
    with pytest.raises(StoreError, match="FileNotFoundError"):
        store_of(job).read_bytes("nothing")
    write_files(tmp_path, FILES)
    bad = make_job(tmp_path, output={"uri": "s3://no-such-bucket/out", "storage": {"endpoint_url": endpoint}})
    with pytest.raises(OutputError, match=r"output\.uri: s3://no-such-bucket/out cannot be written"):
        run_fake(bad)


def test_another_jobs_prefix_is_refused(job: Job, s3: Any) -> None:
    run_fake(job)
    before = keys(s3)
    with pytest.raises(OutputError, match="was written by job 'test-job'"):
        run_fake(job.model_copy(update={"name": "other"}))
    assert keys(s3) == before


def test_local_bytes_are_published_as_they_are(tmp_path: Path, s3: Any, endpoint: str) -> None:
    """A local corpus published to S3 has the very bytes of one published to disk."""
    write_files(tmp_path, FILES)
    local = job_at(tmp_path, None, str(tmp_path / "in"), str(tmp_path / "out"))
    run_fake(local)
    data = local.model_dump(mode="json")
    data["output"] = {"uri": f"s3://{BUCKET}/out", "storage": {"endpoint_url": endpoint}}
    remote = Job.parse(data)
    run_fake(remote)
    store = store_of(remote)
    expected = published_bytes(local)
    assert {name: store.read_bytes(name) for name in expected} == expected


def test_uploads_that_a_killed_run_left_are_aborted_and_those_of_others_are_not(job: Job, s3: Any) -> None:
    store = store_of(job)
    prefix = store.root.partition("/")[2]
    for key in (f"{prefix}/parts/a.parquet", f"{prefix}-other/a.parquet"):
        s3.create_multipart_upload(Bucket=BUCKET, Key=key)
    assert store.abort_uploads(10**12) == 0  # the server says that all uploads began in 2010
    assert store.abort_uploads(0) == 1
    left = s3.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == [f"{prefix}-other/a.parquet"]
    for upload in left:
        s3.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])


def test_an_upload_that_came_short_is_noticed(job: Job, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(job)
    put = store.fs.put_file

    def short(source: str, target: str) -> None:
        Path(source).write_bytes(Path(source).read_bytes()[:2])
        put(source, target)
        Path(source).write_bytes(b"whole")

    monkeypatch.setattr(store.fs, "put_file", short)
    with pytest.raises(StoreUnavailableError, match="2 of 5 bytes arrived"):
        store.write_bytes("a", b"whole")


def test_expired_credentials_are_told_and_the_next_session_is_a_new_one(
    job: Job, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(job)
    error = ClientError({"Error": {"Code": "ExpiredToken", "Message": "old"}}, "PutObject")

    def refuse(source: str, target: str) -> None:
        raise translate_boto_error(error) from error

    with monkeypatch.context() as patch:
        patch.setattr(store.fs, "put_file", refuse)
        with pytest.raises(StoreUnavailableError, match=r"credentials have expired .* renew them"):
            store.write_bytes("a", b"x")
    renewed = store_of(job)
    assert renewed.fs is not store.fs
    renewed.write_bytes("a", b"x")


def test_a_job_ends_with_one_clear_line_when_its_credentials_expire_and_goes_on_later(
    job: Job, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ClientError({"Error": {"Code": "ExpiredToken", "Message": "old"}}, "PutObject")
    s3fs_class, calls = fsspec.get_filesystem_class("s3"), [0]
    put = s3fs_class._put_file

    async def expire(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise translate_boto_error(error) from error
        return await put(self, *args, **options)

    monkeypatch.setattr(s3fs_class, "_put_file", expire)
    with pytest.raises(StoreUnavailableError, match="credentials have expired"):
        run_fake(job)
    run_fake(job)
    assert verify(store_of(job)).problems == ()
