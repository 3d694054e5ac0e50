"""Storage that fails on purpose: a job ends well or with one error of ours, and the next run mends all.

What is published after a fault is, byte for byte, what an undisturbed run publishes; `verify` finds
nothing, and no object is left that nothing names. The S3 server is real, with a proxy in front of it.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiobotocore.endpoint
import boto3
import fault_proxy as faults
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs.core
import zstandard
from fault_proxy import Act, FaultProxy, fault_proxy
from moto.server import ThreadedMotoServer
from outputs import jsonl, run_fake

import tokenmill.store
from tokenmill.corpus import Slice, find_corpus
from tokenmill.errors import DataError, StoreError, StoreUnavailableError, TokenmillError
from tokenmill.job import InputSpec, Job
from tokenmill.parquet import sha256_of
from tokenmill.readers import read_slice
from tokenmill.store import StorageConfig, Store
from tokenmill.testing import make_job
from tokenmill.verify import verify

BUCKET = "corpus"
TRANSIENT: dict[str, Act] = {
    "503": faults.slow_down,
    "500": faults.internal_error,
    "reset": faults.reset,
    "half answer": faults.half_answer,
    "lost answer": faults.lost_answer,
}
LASTING: dict[str, Act] = {
    **TRANSIENT,
    "expired": faults.expired_token,
    "denied": faults.access_denied,
    "no bucket": faults.no_such_bucket,
    "cut short": faults.cut_short,
}
FILES = {
    "a.jsonl": jsonl([{"text": "one two", "k": "x"}, {"text": "three", "k": None}]) + "{bad\n",
    "b.csv": 'text,k\n"multi\nline",y\nsecond,z\n',
}


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    """A proxy before a server that speaks S3, both on free ports of this machine."""
    before = set(threading.enumerate())
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with fault_proxy(server.get_host_and_port()) as proxy:
        yield proxy
    server.stop()
    left = [
        t.name for t in set(threading.enumerate()) - before if not t.name.startswith(("fsspec", "asyncio"))
    ]
    assert left == []


@dataclass(frozen=True, slots=True)
class World:
    """The proxy, a client that goes past it, a job, and the waits that clients asked for, in seconds."""

    proxy: FaultProxy
    s3: Any
    job: Job
    waits_s: list[float]

    @property
    def storage(self) -> StorageConfig:
        return StorageConfig.from_spec(self.job.output.storage)

    @property
    def store(self) -> Store:
        return Store.open(self.job.output.uri, self.storage)

    def put(self, files: dict[str, str | bytes]) -> None:
        for name, content in files.items():
            body = content.encode() if isinstance(content, str) else content
            self.s3.put_object(Bucket=BUCKET, Key=f"in/{name}", Body=body)

    def keys(self, prefix: str = "") -> list[str]:
        return [
            entry["Key"]
            for entry in self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        ]

    def clear(self, prefix: str = "") -> None:
        if keys := self.keys(prefix):
            self.s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in keys]})

    def output(self) -> dict[str, bytes | None]:
        """Every object of the output, by name; receipts without content, for they hold times."""
        names = self.keys("out/")
        return {
            name: None if "/receipts/" in name else self.s3.get_object(Bucket=BUCKET, Key=name)["Body"].read()
            for name in names
        }

    def undisturbed_output(self) -> dict[str, bytes | None]:
        """What a run without faults leaves; the bucket is clean afterwards."""
        self.proxy.undisturb()
        run_fake(self.job)
        output = self.output()
        self.clear("out/")
        return output

    def check_mended(self, expected: dict[str, bytes | None], what: str) -> None:
        """The next run, undisturbed, leaves exactly what is expected."""
        self.proxy.undisturb()
        run_fake(self.job)
        assert self.output() == expected, what
        assert verify(self.store).problems == (), what
        assert "Uploads" not in self.s3.list_multipart_uploads(Bucket=BUCKET), what


class _NoWaits:
    """asyncio for a client that need not wait before it tries again."""

    def __init__(self, waits_s: list[float]) -> None:
        self._waits_s = waits_s

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        self._waits_s.append(seconds)


@pytest.fixture
def world(tmp_path: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    waits_s: list[float] = []
    for module in (s3fs.core, aiobotocore.endpoint):
        monkeypatch.setattr(module, "asyncio", _NoWaits(waits_s))
    fsspec.filesystem("s3").clear_instance_cache()
    proxy.undisturb()
    host, port = proxy.backend
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket=BUCKET)
    place = {"storage": {"endpoint_url": proxy.url}}
    job = make_job(
        tmp_path,
        input={"uri": f"s3://{BUCKET}/in/", "keep": ["k"], "shard_bytes": 1, **place},
        output={"uri": f"s3://{BUCKET}/out", **place},
        aggregate={"group_by": ["k"]},
        quality={"max_reject_rate": 0.5},
        run={"workers": 1},
    )
    world = World(proxy, client, job, waits_s)
    world.put(FILES)
    yield world
    proxy.undisturb()
    world.clear()
    client.delete_bucket(Bucket=BUCKET)
    client.close()
    fsspec.filesystem("s3").clear_instance_cache()


# --- Faults that pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TRANSIENT, "trickled"])
def test_a_job_of_which_every_request_fails_once_ends_as_if_none_had(world: World, name: str) -> None:
    """The client's own retries do it: nobody sees an error."""
    expected = world.undisturbed_output()
    world.proxy.undisturb()
    world.proxy.rule = faults.first_time({**TRANSIENT, "trickled": faults.trickled}[name])
    run_fake(world.job)
    assert world.output() == expected
    came = Counter(request.identity for request in world.proxy.requests)
    assert len(came) > 50
    assert name == "trickled" or min(came.values()) >= 2
    world.check_mended(expected, name)


def fail_from(world: World, number: int, name: str, expected: dict[str, bytes | None]) -> None:
    """A run whose requests fail from one on and for ever, and the run after it."""
    what = f"{name} from request {number} on"
    world.clear("out/")
    fsspec.filesystem("s3").clear_instance_cache()
    world.proxy.undisturb()
    world.proxy.rule = faults.from_on(number, LASTING[name])
    told: list[TokenmillError] = []
    try:
        run_fake(world.job)
    except TokenmillError as exc:
        told.append(exc)
    assert not any("\n" in str(exc) for exc in told), what
    if name in TRANSIENT:
        assert [type(exc) for exc in told] == [StoreUnavailableError], f"{what}: {told}"
    world.check_mended(expected, what)


def fail_from_each(world: World, numbers: range) -> None:
    """Each of these requests in turn, with one of the faults in turn."""
    expected = world.undisturbed_output()
    for number, name in zip(numbers, itertools.cycle(LASTING), strict=False):
        fail_from(world, number, name, expected)


def num_requests(world: World) -> int:
    world.proxy.undisturb()
    run_fake(world.job)
    return len(world.proxy.requests)


def test_a_job_whose_storage_fails_for_good_at_some_request_goes_on_in_the_next_run(world: World) -> None:
    """A sample; the suite of real services takes ten times as many requests."""
    fail_from_each(world, range(0, num_requests(world), 29))


@pytest.mark.service
def test_a_job_whose_storage_fails_for_good_at_many_a_request_goes_on_in_the_next_run(world: World) -> None:
    fail_from_each(world, range(1, num_requests(world), 3))


# --- Faults that last -----------------------------------------------------------------------------

READING: dict[str, Callable[[Store], object]] = {
    "opening": lambda store: sha256_of(store, "job.json"),
    "reading": lambda store: store.read_bytes("job.json"),
    "listing": lambda store: store.sizes(),
    "writing": lambda store: store.write_bytes("job.json", b"x"),
}


@pytest.mark.parametrize("action", READING)
@pytest.mark.parametrize("name", TRANSIENT)
def test_storage_that_never_recovers_is_given_up_within_minutes(world: World, action: str, name: str) -> None:
    world.store.write_bytes("job.json", b"content")
    world.waits_s.clear()
    world.proxy.undisturb()
    world.proxy.rule = faults.from_on(0, TRANSIENT[name])
    with pytest.raises(StoreUnavailableError, match=f"s3://{BUCKET}/out"):
        READING[action](world.store)
    assert len(world.proxy.requests) <= 60
    assert sum(world.waits_s) < 600


@pytest.mark.parametrize("act", [faults.hanging, faults.stalled])
@pytest.mark.parametrize("action", READING)
def test_storage_that_hangs_is_given_up_after_a_bounded_number_of_time_outs(
    world: World, action: str, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenmill.store, "S3_READ_S", 0.02)
    fsspec.filesystem("s3").clear_instance_cache()
    world.store.write_bytes("job.json", b"content")
    world.proxy.undisturb()
    world.proxy.rule = faults.from_on(1 if action in ("opening", "reading") else 0, act)
    with pytest.raises(StoreUnavailableError, match=r"[Tt]imeout"):
        READING[action](world.store)
    assert len(world.proxy.requests) <= 100
    world.proxy.undisturb()
    world.proxy.rule = faults.first_time(act)
    READING[action](world.store)


def test_expired_credentials_are_told_from_each_kind_of_request(world: World) -> None:
    """Subtle: the answer to a HEAD has no body, so it names no reason."""
    world.store.write_bytes("job.json", b"content")
    for action in READING.values():
        world.proxy.undisturb()
        world.proxy.rule = faults.from_on(0, faults.expired_token)
        with pytest.raises(StoreUnavailableError, match="credentials have expired"):
            action(world.store)


def test_refused_credentials_are_told_from_each_kind_of_request(world: World) -> None:
    world.store.write_bytes("job.json", b"content")
    for action in READING.values():
        world.proxy.undisturb()
        world.proxy.rule = faults.from_on(0, faults.access_denied)
        with pytest.raises(StoreError, match="refuses the credentials") as caught:
            action(world.store)
        assert not isinstance(caught.value, StoreUnavailableError)


# --- Writes that are not what they seem -----------------------------------------------------------


def lose_writes(world: World, wanted: Callable[[int, faults.Request], bool]) -> None:
    """Runs of which one wanted write each is answered 200 and not done, and the runs after them."""
    expected = world.undisturbed_output()
    world.proxy.undisturb()
    run_fake(world.job)
    writes = [request for request in world.proxy.requests if request.method == "PUT"]
    lost = [number for number, write in enumerate(writes) if wanted(number, write)]
    assert lost
    for number in lost:
        world.clear("out/")
        world.proxy.undisturb()
        world.proxy.rule = faults.matching("PUT", "", faults.not_applied, skip=number, times=1)
        with pytest.raises(StoreUnavailableError, match=r"0 of \d+ bytes arrived"):
            run_fake(world.job)
        world.check_mended(expected, f"{writes[number].key} was lost")


def test_a_write_that_storage_took_and_lost_is_noticed_and_done_again(world: World) -> None:
    lose_writes(world, lambda number, write: number % 5 == 0)


def test_a_copy_that_storage_took_and_lost_is_noticed_and_done_again(world: World) -> None:
    output = world.job.output.model_copy(update={"target_part_bytes": 1})
    world = replace(world, job=world.job.model_copy(update={"output": output}))
    lose_writes(world, lambda number, write: write.is_copy)


# --- Reads that are not whole ---------------------------------------------------------------------


def parquet_bytes(rows: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(rows)]}), out)
    return out.getvalue()


def arrow_bytes(rows: int) -> bytes:
    table, out = pa.table({"text": [f"row {n}" for n in range(rows)]}), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return out.getvalue()


LINES = jsonl([f"row {n}" for n in range(500)]).encode()
CORPORA: dict[str, bytes] = {
    "c.jsonl": LINES,
    "c.jsonl.gz": gzip.compress(LINES),
    "c.jsonl.zst": zstandard.compress(LINES),
    "c.txt": b"".join(b"row %d\n" % n for n in range(500)),
    "c.csv": b"text\n" + b"".join(b"row %d\n" % n for n in range(500)),
    "c.parquet": parquet_bytes(500),
    "c.arrow": arrow_bytes(500),
}


def planned(world: World, name: str, **options: Any) -> tuple[Slice, InputSpec, StorageConfig]:
    """One file of the corpus as it is now, ready to be read."""
    spec = InputSpec(uri=f"s3://{BUCKET}/in/{name}")
    storage = StorageConfig(options={**world.storage.options, **options})
    (file,) = find_corpus(spec, storage).files
    return Slice(file=file, text_bytes=file.size_bytes), spec, storage


def texts(found: tuple[Slice, InputSpec, StorageConfig]) -> list[str]:
    return [text for batch in read_slice(*found) for text in batch.texts]


@pytest.mark.parametrize("name", CORPORA)
def test_no_row_is_lost_to_a_short_answer(world: World, name: str) -> None:
    world.put({name: CORPORA[name]})
    found = planned(world, name)
    expected = [f"row {n}" for n in range(500)]
    for act in (faults.cut_short, faults.half_answer, faults.reset):
        world.proxy.rule = faults.matching("GET", name, act, times=1)
        assert texts(found) == expected
    world.proxy.rule = faults.matching("GET", name, faults.cut_short)
    with pytest.raises(StoreUnavailableError, match=rf"{name}: \d+ of {len(CORPORA[name])} bytes came"):
        texts(found)
    world.proxy.rule = faults.matching("HEAD", name, faults.shrunk)
    with pytest.raises(DataError, match="changed while the job ran"):
        texts(found)


@pytest.mark.parametrize("name", CORPORA)
def test_a_bit_that_flips_on_its_way_is_noticed_where_storage_keeps_checksums(
    world: World, name: str
) -> None:
    world.put({name: CORPORA[name]})
    world.proxy.rule = faults.matching("GET", name, faults.flipped)
    with pytest.raises(StoreUnavailableError, match="checksum"):
        texts(planned(world, name))


# --- Objects that are replaced --------------------------------------------------------------------

OLD, NEW = (b"%s\n" % (word * 250) * 4000 for word in (b"old ", b"new "))
SMALL_BLOCKS = {"default_block_size": 1 << 16}


@pytest.mark.parametrize("serve", [faults.passed_on, faults.heedless])
@pytest.mark.parametrize("number", range(4))
def test_rows_of_two_versions_of_a_file_are_never_mixed(world: World, number: int, serve: Act) -> None:
    """Replaced before the n-th request for its bytes, on servers that know If-Match and that do not."""
    world.put({"c.txt": OLD})
    found = planned(world, "c.txt", **SMALL_BLOCKS)
    replaced = faults.after(lambda: world.put({"c.txt": NEW}), serve)
    rules = [
        faults.matching("GET", "c.txt", replaced, skip=number, times=1),
        faults.matching("GET", "c.txt", serve),
    ]
    world.proxy.rule = lambda request, seen: rules[0](request, seen) or rules[1](request, seen)
    with pytest.raises(DataError, match="changed while the job ran"):
        texts(found)
    assert rules[0].times < 1


@pytest.mark.parametrize("number", range(2))
def test_a_file_replaced_between_plan_and_reading_is_told(world: World, number: int) -> None:
    """Before the request that opens it, and right after it."""
    world.put({"c.txt": OLD})
    found = planned(world, "c.txt")
    replaced = faults.after(lambda: world.put({"c.txt": NEW}))
    world.proxy.rule = faults.matching("HEAD" if number == 0 else "GET", "c.txt", replaced, times=1)
    with pytest.raises(DataError, match=r"c\.txt: changed while the job ran"):
        texts(found)
    assert set(texts(planned(world, "c.txt"))) == {("new " * 250)}
