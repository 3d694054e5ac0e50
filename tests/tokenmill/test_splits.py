"""Byte ranges of lines: whole lines, none lost, none twice, the ordinals of the whole file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import jsonl, new_folder, published, run_fake, write_files

from tokenmill import splits
from tokenmill.corpus import find_corpus
from tokenmill.errors import DataError
from tokenmill.job import InputSpec
from tokenmill.manifest import remembered_cuts
from tokenmill.readers import read_slice
from tokenmill.splits import is_splittable, join_scans, scan_block, split_slices
from tokenmill.store import StorageConfig
from tokenmill.testing import FakeBackend, make_job, make_run

contents = st.lists(st.sampled_from([b"\n", b"a", b"bb\n", b"\r\n", b"c" * 30, b"\xef\xbb\xbf"]), max_size=60)


@pytest.fixture(autouse=True)
def every_file_is_large() -> Iterator[None]:
    with mock.patch.object(splits, "SMALL_FILE_BYTES", 0), mock.patch.dict(splits._found, clear=True):
        yield


@given(contents.map(b"".join), st.integers(1, 40), st.integers(1, 25))
def test_cuts_lie_behind_the_first_line_end_at_each_multiple(data: bytes, step: int, block: int) -> None:
    scans = (scan_block(data[at : at + block], at, step) for at in range(0, len(data), block))
    cuts = join_scans(scans, len(data), step)
    ends = (data.find(b"\n", mark) for mark in range(step, len(data), step))
    places = sorted({end + 1 for end in ends if end >= 0} - {len(data)})
    assert cuts == [[place, data[:place].count(b"\n")] for place in places]


lines = st.lists(
    st.sampled_from(['{"text": "one"}', '{"text": "two three"}', "", "{bad", '{"text": null}']), max_size=30
)


@given(lines, st.integers(1, 90), st.integers(1, 50), st.booleans(), st.sampled_from([".jsonl", ".txt"]))
def test_a_split_file_gives_the_rows_of_the_whole_one(
    rows: list[str], shard_bytes: int, block: int, last_ends: bool, suffix: str
) -> None:
    content = "\n".join(['{"text": "first"}', *rows]) + "\n" * last_ends
    with new_folder() as folder, mock.patch.object(splits, "BLOCK_BYTES", block):
        write_files(folder, {f"a{suffix}": content})
        found = []
        for size in (shard_bytes, 10**6):
            job = make_job(
                folder,
                input={"shard_bytes": size},
                output={"uri": f"{folder}/{size}"},
                quality={"max_reject_rate": 1},
            )
            manifest = run_fake(job)
            found.append((manifest.counts, published(job), published(job, "rejects")))
            num_shards = len(manifest.shards)
        assert num_shards == 1
        (split, *rest), (whole, *expected) = found
        assert rest == expected
        assert (split.rows_in, split.rejects, split.lines_blank) == (
            whole.rows_in,
            whole.rejects,
            whole.lines_blank,
        )


def test_large_files_of_lines_are_split_and_no_others(tmp_path: Path) -> None:
    big = jsonl(["word " * 20] * 5)
    files = {"a.jsonl": big, "b.txt": big, "c.csv": "text\n" + big.replace('"', ""), "d.jsonl": jsonl(["x"])}
    write_files(tmp_path, files)
    spec = InputSpec(uri=str(tmp_path / "in"), shard_bytes=100)
    found = {
        Path(file.uri).name: is_splittable(file, spec) for file in find_corpus(spec, StorageConfig()).files
    }
    assert found == {"a.jsonl": True, "b.txt": True, "c.csv": False, "d.jsonl": False}
    whole = spec.model_copy(update={"rows": "files"})
    assert not is_splittable(find_corpus(whole, StorageConfig()).files[1], whole)
    with mock.patch.object(splits, "SMALL_FILE_BYTES", 1 << 20):
        assert not is_splittable(find_corpus(spec, StorageConfig()).files[0], spec)


def test_lines_are_counted_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["one", "two", "three"])})
    job = make_job(tmp_path, input={"shard_bytes": 20})
    with mock.patch.object(splits, "_read_block", wraps=splits._read_block) as reads:
        run_fake(job)
        make_run(job).plan()
        assert reads.call_count == 1
        splits._found.clear()  # as in a new process: the output remembers
        backend = FakeBackend()
        run_fake(job, backend)
        assert (reads.call_count, backend.shapes) == (1, [])
        write_files(tmp_path, {"a.jsonl": jsonl(["one", "two", "three", "four"])})
        run_fake(job)
        assert reads.call_count == 2
    assert [row["row_ordinal"] for row in published(job)] == [0, 1, 2, 3]
    assert len(remembered_cuts(make_run(job).store)) == 1


def test_a_plan_of_ranges_survives_json_and_its_shards_have_keys_of_their_own(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["same"] * 6)})
    plan = make_run(make_job(tmp_path, input={"shard_bytes": 20})).plan()
    assert len(plan.shards) == len(set(plan.keys_of("tokenize"))) == 5
    for shard in plan.shards:
        assert type(shard).from_json(json.loads(json.dumps(shard.to_json()))) == shard


@pytest.mark.parametrize("cut", [[[10, 1]], [[19, 1], [30, 2]]], ids=["ends badly", "starts badly"])
def test_a_range_whose_borders_are_no_line_ends_is_refused(tmp_path: Path, cut: list[list[int]]) -> None:
    spec = InputSpec(uri=str(write_files(tmp_path, {"a.jsonl": jsonl(["one"] * 3)}) / "a.jsonl"))
    (file,) = find_corpus(spec, StorageConfig()).files
    with pytest.raises(DataError, match=r"a\.jsonl: changed while the job ran"):
        [list(read_slice(piece, spec, StorageConfig())) for piece in split_slices(file, cut)]


def test_a_file_that_shrinks_while_its_lines_are_counted_is_told_of(tmp_path: Path) -> None:
    path = write_files(tmp_path, {"a.txt": "one\ntwo\n"}) / "a.txt"
    spec = InputSpec(uri=str(path), shard_bytes=4)
    (file,) = find_corpus(spec, StorageConfig()).files
    path.write_text("one\n")
    with pytest.raises(DataError, match=r"a\.txt: shorter than listed"):
        splits._read_block(file, 0, 4, StorageConfig())
