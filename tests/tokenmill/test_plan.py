"""The plan: slices along row groups, shards with keys, and what is left to do."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import jsonl, new_folder, published, run_fake, write_files

from tokenmill.plan import Plan, Shard, find_todo
from tokenmill.testing import FakeBackend, make_job, make_run


def parquet_bytes(sizes: list[int]) -> bytes:
    """A Parquet file with row groups of these many rows."""
    schema = pa.schema([("text", pa.string())])
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema) as writer:
        for number, size in enumerate(sizes):
            texts = [f"group {number} row {row}" for row in range(size)]
            writer.write_table(pa.table({"text": texts}, schema=schema))
    return sink.getvalue()


@settings(max_examples=20)
@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 400))
def test_row_groups_become_slices_without_a_row_lost(sizes: list[int], shard_bytes: int) -> None:
    with new_folder() as folder:
        write_files(folder, {"a.parquet": parquet_bytes(sizes)})
        job = make_job(folder, input={"shard_bytes": shard_bytes})
        plan = make_run(job).plan()
        slices = [piece for shard in plan.shards for piece in shard.slices]
        assert sum(piece.num_rows or 0 for piece in slices) == sum(sizes)
        assert sum(piece.num_groups or 0 for piece in slices) == len(sizes)
        run_fake(job)
        rows = published(job)
        assert [row["row_ordinal"] for row in rows] == list(range(sum(sizes)))


def test_a_plan_survives_json(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.parquet": parquet_bytes([3, 2]), "b.jsonl": jsonl(["x"])})
    plan = make_run(make_job(tmp_path, input={"shard_bytes": 1})).plan()
    assert [Shard.from_json(json.loads(json.dumps(shard.to_json()))) for shard in plan.shards] == list(
        plan.shards
    )
    assert plan.num_files == 2
    assert plan.text_bytes == sum(shard.text_bytes for shard in plan.shards)


def test_a_compressed_file_counts_as_more_text_than_it_has_bytes(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"x" * 100, "b.txt.gz": __import__("gzip").compress(b"x" * 100)})
    plan = make_run(make_job(tmp_path)).plan()
    sizes = {Path(p.file.uri).name: p for shard in plan.shards for p in shard.slices}
    assert sizes["a.txt"].text_bytes == 100
    assert sizes["b.txt.gz"].text_bytes > sizes["b.txt.gz"].file.size_bytes


def test_planning_writes_nothing(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["x"])})
    make_run(make_job(tmp_path)).plan()
    assert not (tmp_path / "out").exists()


def todo(plan: Plan, run) -> tuple[list[int], list[int]]:
    left = find_todo(plan, run.store)
    return [shard.index for shard in left.tokenize], [shard.index for shard in left.infer]


def test_a_shard_is_done_if_and_only_if_its_part_and_its_receipt_are_there(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["x"]), "b.jsonl": jsonl(["y"])})
    run = make_run(make_job(tmp_path, input={"shard_bytes": 1}))
    plan = run.plan()
    assert todo(plan, run) == ([0, 1], [0, 1])
    run.tokenize(plan.shards[1])
    assert todo(plan, run) == ([0], [0, 1])
    run.infer(plan.shards[1], FakeBackend())
    assert todo(plan, run) == ([0], [0])
    out = tmp_path / "out"
    (out / "receipts" / f"tokenize-{plan.shards[1].tokens_key}.json").unlink()
    assert todo(plan, run) == ([0, 1], [0])
    (out / "parts" / f"{plan.shards[1].results_key}.parquet").unlink()
    assert todo(plan, run) == ([0, 1], [0, 1])
