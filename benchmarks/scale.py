"""How planning, resuming and streaming grow with the corpus.

    python -m benchmarks.scale files --number 100000       many small files, and a receipt for each shard
    python -m benchmarks.scale bucket --number 10000       as many receipts in a bucket
    python -m benchmarks.scale stream jsonl.zst --gb 20    all stages over one large file

The engine with its fakes: what is timed is listing, reading, cutting, hashing, deciding and writing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tokenmill.engine import Run, finish
from tokenmill.plan import Plan
from tokenmill.quantities import size_bytes
from tokenmill.receipts import Stage, part_name, peak_memory_bytes, receipt_name
from tokenmill.testing import FakeBackend, make_job, make_run

FILES_A_FOLDER = 1000
STAGES: tuple[Stage, ...] = ("tokenize", "infer")
BUCKET = "scale"
PORT = 5599


# --- Many files, many receipts ---


def write_corpus(folder: Path, num_files: int) -> None:
    """Files of one short row each."""
    for number in range(num_files):
        path = folder / f"{number // FILES_A_FOLDER:04d}" / f"{number % FILES_A_FOLDER:04d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "row {number}"}}\n')


def finished_names(plan: Plan) -> list[str]:
    """A receipt and a part for each stage of each shard."""
    keys = [(stage, key) for stage in STAGES for key in plan.keys_of(stage)]
    return [name for stage, key in keys for name in (receipt_name(stage, key), part_name(stage, key))]


def timed_plan(run: Run, num_files: int) -> Plan:
    """The plan; prints how long it took."""
    start = time.perf_counter()
    plan = run.plan()
    seconds = time.perf_counter() - start
    print(f"{num_files:,} files: planned in {seconds:.1f} s as {len(plan.shards):,} shards", flush=True)
    return plan


def timed_resume(run: Run, plan: Plan, where: str) -> None:
    """Decide what is left, which is nothing; print how long it took."""
    start = time.perf_counter()
    todo = run.todo(plan)
    seconds = time.perf_counter() - start
    assert not todo.infer
    memory = size_bytes(peak_memory_bytes())
    print(
        f"{2 * len(plan.shards):,} receipts {where}: resume decided in {seconds:.1f} s; peak memory {memory}"
    )


def many_files(num_files: int) -> None:
    """On local disk."""
    with TemporaryDirectory(prefix="tokenmill-scale-") as name:
        folder = Path(name)
        write_corpus(folder / "in", num_files)
        run = make_run(make_job(folder, input={"shard_bytes": 1}))
        plan = timed_plan(run, num_files)
        for path in (folder / "out" / name for name in finished_names(plan)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        timed_resume(run, plan, "on disk")


def many_objects(num_receipts: int) -> None:
    """The corpus on local disk, the output in a bucket of an S3 server on this machine."""
    num_files = num_receipts // 2
    with s3_server() as endpoint, TemporaryDirectory(prefix="tokenmill-scale-") as name:
        folder = Path(name)
        write_corpus(folder / "in", num_files)
        output = {"uri": f"s3://{BUCKET}/out", "storage": {"endpoint_url": endpoint}}
        run = make_run(make_job(folder, input={"shard_bytes": 1}, output=output))
        plan = timed_plan(run, num_files)
        with ThreadPoolExecutor(8) as pool:
            paths = [run.store.path(name) for name in finished_names(plan)]
            list(pool.map(lambda path: run.store.fs.pipe_file(path, b""), paths))
        timed_resume(run, plan, "in S3")


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server in a process of its own, with an empty bucket; its endpoint."""
    import boto3  # type: ignore[import-untyped]

    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    endpoint = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(endpoint)
            boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
            yield endpoint
        finally:
            server.terminate()


def _wait_for(endpoint: str) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(endpoint).close()
        except URLError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"{endpoint}: the server does not answer")


# --- One large file ---

WORD = "x" * 1000  # the fake tokenizer takes as long for it as for a short one
ROW_BYTES = 20 * len(WORD)
BLOCK_ROWS = 2000


def row_blocks(total_bytes: int) -> Iterator[list[str]]:
    """Different texts of about ROW_BYTES, in blocks."""
    tail = f" {WORD}" * (ROW_BYTES // len(WORD))
    for first in range(0, total_bytes // ROW_BYTES, BLOCK_ROWS):
        yield [f"row {number}{tail}" for number in range(first, first + BLOCK_ROWS)]


def write_jsonl(path: Path, total_bytes: int) -> None:
    with path.open("wb") as file:
        for block in row_blocks(total_bytes):
            file.write("".join(json.dumps({"text": text}) + "\n" for text in block).encode())


def write_zst(path: Path, total_bytes: int) -> None:
    with zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(1)) as file:
        for block in row_blocks(total_bytes):
            file.write("".join(json.dumps({"text": text}) + "\n" for text in block).encode())


def write_csv(path: Path, total_bytes: int) -> None:
    with path.open("w") as file:
        file.write("text\n")
        for block in row_blocks(total_bytes):
            file.write("".join(f'"{text}"\n' for text in block))


def write_parquet(path: Path, total_bytes: int) -> None:
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for block in row_blocks(total_bytes):
            writer.write_table(pa.table({"text": block}, schema=schema))


WRITERS: Mapping[str, Callable[[Path, int], None]] = {
    "jsonl": write_jsonl,
    "jsonl.zst": write_zst,
    "csv": write_csv,
    "parquet": write_parquet,
}


def one_large_file(kind: str, gigabytes: float) -> None:
    """A whole job over it."""
    with TemporaryDirectory(prefix="tokenmill-scale-") as name:
        folder = Path(name)
        (folder / "in").mkdir()
        path = folder / "in" / f"a.{kind}"
        WRITERS[kind](path, int(gigabytes * 1e9))
        before = size_bytes(peak_memory_bytes())
        start = time.perf_counter()
        run = make_run(make_job(folder))
        num_shards = len(run.plan().shards)
        planned = time.perf_counter() - start
        manifest = finish(run, FakeBackend())
        seconds = time.perf_counter() - start
        print(
            f"{kind}: {gigabytes:g} GB of text ({size_bytes(path.stat().st_size)} on disk), "
            f"{manifest.counts.rows_out:,} rows, {num_shards:,} shards: planned in {planned:.1f} s, "
            f"all stages in {seconds:.0f} s; peak memory {size_bytes(peak_memory_bytes())} "
            f"({before} before the job)"
        )


def main() -> None:
    """One of the three, as asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("files").add_argument("--number", type=int, default=100_000)
    commands.add_parser("bucket").add_argument("--number", type=int, default=10_000)
    stream = commands.add_parser("stream")
    stream.add_argument("kind", choices=WRITERS)
    stream.add_argument("--gb", type=float, default=20)
    asked = parser.parse_args()
    if asked.what == "files":
        many_files(asked.number)
    elif asked.what == "bucket":
        many_objects(asked.number)
    else:
        one_large_file(asked.kind, asked.gb)


if __name__ == "__main__":
    main()
