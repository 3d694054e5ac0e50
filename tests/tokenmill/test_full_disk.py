"""A local disk that is full, broken or read-only at any write: one clear error, nothing half-made.

The run after it leaves, byte for byte, what an undisturbed one leaves.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from outputs import jsonl, run_fake, tree, write_files

import tokenmill.store
from tokenmill.errors import DataError, TokenmillError
from tokenmill.job import Job
from tokenmill.store import Store
from tokenmill.testing import make_job
from tokenmill.verify import verify

FULL = Path("/dev/full")  # the kernel's own full disk: every write to it is ENOSPC
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
SAYS_FULL = "the disk is full|No space left on device"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    rows = [{"text": f"row {n} " + "word " * (n % 7), "k": str(n % 2)} for n in range(12)]
    write_files(tmp_path, {"a.jsonl": jsonl(rows[:7]) + "{bad\n", "b.jsonl": jsonl(rows[7:])})
    return make_job(
        tmp_path,
        input={"keep": ["k"], "shard_bytes": 1},
        aggregate={"group_by": ["k"]},
        output={"target_part_bytes": 1},
        quality={"max_reject_rate": 0.5},
        run={"workers": 1},
    )


Output = dict[str, bytes | None]


def output_of(job: Job) -> Output:
    """Every file of an output, scratch files too; receipts without content, for they hold times."""
    found = tree(Path(job.output.uri)) if Path(job.output.uri).exists() else {}
    return {name: None if name.startswith("receipts/") else content for name, content in found.items()}


def undisturbed_output(job: Job) -> Output:
    run_fake(job)
    output = output_of(job)
    shutil.rmtree(job.output.uri)
    return output


def check_nothing_half_made(job: Job, expected: Output, what: str) -> None:
    """What is there is whole, receipts too, and no scratch file is among it."""
    assert output_of(job).items() <= expected.items(), what
    for receipt in Path(job.output.uri).glob("receipts/*"):
        json.loads(receipt.read_bytes())


def check_mended(job: Job, expected: Output, what: str) -> None:
    run_fake(job)
    assert output_of(job) == expected, what
    assert verify(Store.open(job.output.uri)).problems == (), what


WRITES: list[tuple[object, str]] = [
    (os, "fsync"),
    (os, "link"),
    (shutil, "copyfile"),
    (tempfile, "NamedTemporaryFile"),
    (Path, "mkdir"),
    (Path, "replace"),
    (Path, "write_bytes"),
    (pq.ParquetWriter, "__init__"),
    (pq.ParquetWriter, "write_table"),
    (pq.ParquetWriter, "close"),
    (LocalFileSystem, "rm_file"),
]


@contextmanager
def failing_at(step: int, error: Callable[[], BaseException]) -> Iterator[list[str]]:
    """Whatever writes, flushes, renames or deletes is a step; one of them raises in place of it.

    Gives the names of the steps that were reached.
    """
    steps: list[str] = []

    def counted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            steps.append(name)
            if len(steps) - 1 == step:
                raise error()
            return original(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WRITES:
            patch.setattr(owner, name, counted(name, getattr(owner, name)))
        yield steps


def run_told(job: Job, kinds: type[BaseException] = TokenmillError) -> str | None:
    """What the error of a run says; None for a run without one."""
    try:
        run_fake(job)
    except kinds as exc:
        return str(exc)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """error: makes what is raised.  says: a pattern of what a run then has to say."""

    error: Callable[[], BaseException]
    says: str

    @classmethod
    def of(cls, number: int, says: str) -> Fault:
        return cls(error=lambda: OSError(number, os.strerror(number)), says=says)

    @property
    def kind(self) -> type[BaseException]:
        """Of what arrives at the caller."""
        return TokenmillError if isinstance(self.error(), Exception) else type(self.error())


FAULTS: dict[str, Fault] = {
    "full": Fault.of(errno.ENOSPC, SAYS_FULL),
    "quota": Fault.of(errno.EDQUOT, "the disk is full|quota"),
    "broken": Fault.of(errno.EIO, "Input/output error"),
    "read-only": Fault.of(errno.EROFS, "Read-only file system"),
    "interrupted": Fault(error=lambda: KeyboardInterrupt("stop"), says="stop"),
    "ended": Fault(error=lambda: SystemExit("stop"), says="stop"),
}


def steps_of(job: Job) -> list[str]:
    with failing_at(-1, RuntimeError) as steps:
        run_fake(job)
    assert len(steps) > 40
    assert set(steps) >= {"fsync", "mkdir", "replace", "write_bytes", "write_table", "close", "link"}
    return steps


def fail_at(job: Job, step: int, name: str, fault: Fault, expected: Output) -> None:
    """A run of which one step fails, what it leaves, and the run after it."""
    shutil.rmtree(job.output.uri)
    with failing_at(step, fault.error):
        told = run_told(job, fault.kind)
    what = f"step {step}, {name}: {told}"
    if told is None:
        assert name == "link", what  # where links fail, files are copied
    else:
        assert re.search(fault.says, told), what
    check_nothing_half_made(job, expected, what)
    check_mended(job, expected, what)


def test_a_disk_that_fails_at_some_write_costs_one_error_and_no_file(job: Job) -> None:
    """A sample; the suite of real services takes every write."""
    fail_at_each(job, slice(0, None, 4))


@pytest.mark.service
def test_a_disk_that_fails_at_any_write_costs_one_error_and_no_file(job: Job) -> None:
    fail_at_each(job, slice(None))


def fail_at_each(job: Job, chosen: slice) -> None:
    """Each of these steps in turn, with one of the faults in turn."""
    expected = undisturbed_output(job)
    steps = list(enumerate(steps_of(job)))[chosen]
    for (step, at), fault in zip(steps, itertools.cycle(FAULTS.values()), strict=False):
        fail_at(job, step, at, fault, expected)


@contextmanager
def full_at(scratch: int, folder_of: Callable[[], Path]) -> Iterator[list[str]]:
    """One of the scratch files that a run writes lies on a disk that is full; gives their names."""
    names: list[str] = []
    name_of = tokenmill.store._scratch_name

    def named() -> str:
        names.append(name_of())
        if len(names) - 1 == scratch:
            folder_of().mkdir(parents=True, exist_ok=True)
            (folder_of() / names[-1]).symlink_to(FULL)
        return names[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenmill.store, "_scratch_name", named)
        yield names


@needs_full
def test_a_disk_that_is_really_full_is_told_at_every_file(job: Job) -> None:
    expected = undisturbed_output(job)
    scratch = Path(job.output.uri) / ".tmp"
    with full_at(-1, lambda: scratch) as names:
        run_fake(job)
    assert len(names) > 10
    for number in range(len(names)):
        shutil.rmtree(job.output.uri)
        with full_at(number, lambda: scratch):
            told = run_told(job)
        assert told is not None
        assert re.search(SAYS_FULL, told), told
        check_nothing_half_made(job, expected, f"file {number}")
        check_mended(job, expected, f"file {number}")


@needs_full
def test_a_full_folder_for_temporary_files_is_told_for_remote_outputs(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch files of a remote output lie in the system's folder for temporary files."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def remote() -> Job:
        output = job.output.model_copy(update={"uri": f"memory://full-{uuid.uuid4().hex}/out"})
        return job.model_copy(update={"output": output})

    def published_in(job: Job) -> dict[str, bytes]:
        store = Store.open(job.output.uri)
        return store.read_many(name for name in store.sizes() if name.partition("/")[0] in DATA)

    whole = remote()
    with full_at(-1, lambda: scratch) as names:
        run_fake(whole)
    expected = published_in(whole)
    for number in range(len(names)):
        failed = remote()
        with full_at(number, lambda: scratch):
            told = run_told(failed)
        assert told is not None
        assert re.search(SAYS_FULL, told), told
        assert list(scratch.iterdir()) == []
        assert published_in(failed).items() <= expected.items()
        run_fake(failed)
        assert published_in(failed) == expected
        assert verify(Store.open(failed.output.uri)).problems == ()


DATA = ("tokens", "parts", "rejects", "results", "groups", "manifest.json")


@contextmanager
def no_file_larger_than(size_bytes: int) -> Iterator[None]:
    """The kernel cuts writes of this process off there, in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size_bytes", [0, 1, 300, 1000, 1500, 2500, 3500])
def test_a_write_that_the_kernel_cuts_off_in_the_middle_leaves_no_half_file(
    job: Job, size_bytes: int
) -> None:
    expected = undisturbed_output(job)
    with no_file_larger_than(size_bytes):
        told = run_told(job)
    assert told is not None
    assert re.search(r"File too large|\[Errno 27\]", told), told
    check_nothing_half_made(job, expected, told)
    check_mended(job, expected, told)


# --- Files that are damaged while nobody looks ----------------------------------------------------


def parts_of(job: Job, pattern: str) -> list[Path]:
    return sorted(Path(job.output.uri).glob(pattern))


def finish_shards(job: Job) -> None:
    """All but publication."""
    run_fake(job)
    for path in parts_of(job, "results/*") + parts_of(job, "groups/*") + parts_of(job, "manifest.json"):
        path.unlink()


def rewrite(path: Path, content: bytes) -> None:
    path.unlink()  # it may share its bytes with another name
    path.write_bytes(content)


def follow_advice(job: Job, told: str) -> None:
    """Delete what the message says; it names a file of the output, as a path or by its name in it."""
    (name,) = re.findall(r"delete (\S+) (?:and|to)", told)
    target = told.partition(": ")[0] if name == "it" else f"{job.output.uri}/{name}"
    Path(target).unlink()


@pytest.mark.parametrize("pattern", ["receipts/tokenize-*", "receipts/infer-*", "manifest.json"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_record_that_is_cut_short_is_named_and_made_again_once_deleted(
    job: Job, pattern: str, keep: float
) -> None:
    expected = undisturbed_output(job)
    run_fake(job) if pattern == "manifest.json" else finish_shards(job)
    path = parts_of(job, pattern)[0]
    rewrite(path, path.read_bytes()[: int(path.stat().st_size * keep)])
    assert any(path.name in problem for problem in verify(Store.open(job.output.uri)).problems)
    with pytest.raises(DataError, match=path.name) as caught:
        run_fake(job)
    follow_advice(job, str(caught.value))
    check_mended(job, expected, pattern)


@pytest.mark.parametrize("pattern", ["tokens/*", "parts/*", "rejects/*"])
@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_a_part_that_is_cut_short_is_named_and_made_again_once_its_receipt_is_deleted(
    job: Job, pattern: str, damage: str
) -> None:
    expected = undisturbed_output(job)
    finish_shards(job)
    path = parts_of(job, pattern)[0]
    rewrite(path, b"" if damage == "empty" else path.read_bytes()[:-7])
    assert any(path.name in problem for problem in verify(Store.open(job.output.uri)).problems)
    with pytest.raises(DataError, match=path.name) as caught:
        run_fake(job)
    follow_advice(job, str(caught.value))
    check_mended(job, expected, pattern)


@pytest.mark.parametrize("pattern", ["tokens/*", "parts/*"])
def test_a_part_with_a_flipped_byte_is_never_merged_or_inferred(job: Job, pattern: str) -> None:
    """Checksums of pages tell it before its rows go anywhere."""
    output = job.output.model_copy(update={"target_part_bytes": 10**9})
    job = job.model_copy(update={"output": output})
    expected = undisturbed_output(job)
    finish_shards(job)
    path = parts_of(job, pattern)[0]
    if pattern == "tokens/*":
        for later in parts_of(job, "parts/*") + parts_of(job, "receipts/infer-*"):
            later.unlink()
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1
    rewrite(path, bytes(content))
    assert any(path.name in problem for problem in verify(Store.open(job.output.uri)).problems)
    with pytest.raises(DataError, match=rf"{path.name}: .*; delete it and run again") as caught:
        run_fake(job)
    follow_advice(job, str(caught.value))
    check_mended(job, expected, pattern)


def test_a_part_with_a_flipped_byte_that_was_published_is_told_by_verify(job: Job) -> None:
    """A large part is published by a link or a copy, without being read."""
    job = job.model_copy(update={"aggregate": job.aggregate.model_copy(update={"group_by": []})})
    finish_shards(job)
    path = parts_of(job, "parts/*")[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1
    rewrite(path, bytes(content))
    run_fake(job)
    problems = verify(Store.open(job.output.uri)).problems
    assert [problem.partition(": ")[2] for problem in problems] == [CHANGED, CHANGED]
    assert {problem.partition("/")[0] for problem in problems} == {"parts", "results"}


CHANGED = "checksum differs: its bytes changed after it was written"


@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_claim_that_is_cut_short_is_named_with_a_remedy_that_works(job: Job, keep: float) -> None:
    """Without job.json the folder would be nobody's: deleting it alone would not help."""
    run_fake(job)
    path = Path(job.output.uri) / "job.json"
    rewrite(path, path.read_bytes()[: int(path.stat().st_size * keep)])
    for look in (lambda: run_fake(job), lambda: verify(Store.open(job.output.uri))):
        with pytest.raises(DataError, match=r"job\.json: not readable as JSON: .*; choose another folder"):
            look()
