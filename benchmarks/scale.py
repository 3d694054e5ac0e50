"""How planning and resuming grow: many small files, and a receipt for each of their shards.

    python -m benchmarks.scale --files 100000

Engine with the fake tokenizer: what is timed is listing, reading heads, cutting, hashing and deciding.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenmill.plan import Plan
from tokenmill.quantities import size_bytes
from tokenmill.receipts import Stage, part_name, peak_memory_bytes, receipt_name
from tokenmill.testing import make_job, make_run

FILES_A_FOLDER = 1000
STAGES: tuple[Stage, ...] = ("tokenize", "infer")


def write_corpus(folder: Path, num_files: int) -> None:
    """Files of one short row each."""
    for number in range(num_files):
        path = folder / f"{number // FILES_A_FOLDER:04d}" / f"{number % FILES_A_FOLDER:04d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "row {number}"}}\n')


def touch_finished(out: Path, plan: Plan) -> None:
    """An empty receipt and part for each stage of each shard."""
    for name in ("receipts", "tokens", "parts"):
        (out / name).mkdir(parents=True)
    for stage in STAGES:
        for key in plan.keys_of(stage):
            (out / receipt_name(stage, key)).touch()
            (out / part_name(stage, key)).touch()


def main() -> None:
    """Print seconds and peak memory of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    num_files: int = parser.parse_args().files
    with TemporaryDirectory(prefix="tokenmill-scale-") as name:
        folder = Path(name)
        write_corpus(folder / "in", num_files)
        run = make_run(make_job(folder, input={"shard_bytes": 1}))
        start = time.perf_counter()
        plan = run.plan()
        planned = time.perf_counter() - start
        touch_finished(folder / "out", plan)
        start = time.perf_counter()
        todo = run.todo(plan)
        decided = time.perf_counter() - start
    assert not todo.infer
    memory = size_bytes(peak_memory_bytes())
    print(f"{num_files:,} files: planned in {planned:.1f} s as {len(plan.shards):,} shards")
    print(f"{2 * len(plan.shards):,} receipts: resume decided in {decided:.1f} s; peak memory {memory}")


if __name__ == "__main__":
    main()
