"""Arrow IPC files and streams, and datasets saved on disk, which are folders of streams."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pytest
from outputs import jsonl, published, read_all, run_fake, write_files

from tokenmill.errors import DataError, InputNotFoundError, UnreadableFileError
from tokenmill.job import InputSpec
from tokenmill.testing import make_job, make_run

TABLE = pa.table({"text": ["a", None, "NA", "d"], "id": [1, 2, 3, 4], "k": [[1], [2], [], None]})


def write(path: Path, table: pa.Table = TABLE, stream: bool = False, batch_rows: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_files_and_streams(tmp_path: Path, stream: bool) -> None:
    path = write(tmp_path / "a.arrow", stream=stream)
    batches = read_all(InputSpec(uri=str(path), id="id", keep=["k"]))
    assert [text for batch in batches for text in batch.texts] == ["a", "NA", "d"]
    columns = pa.concat_batches([batch.columns for batch in batches])
    assert columns["row_ordinal"].to_pylist() == [0, 2, 3]
    assert columns["id"].to_pylist() == ["1", "3", "4"]
    assert columns["k"].to_pylist() == [[1], [], None]
    assert [r.row_ordinal for batch in batches for r in batch.rejects] == [1]


@pytest.mark.parametrize("compression", ["zstd", "lz4", "uncompressed"])
def test_feather_and_no_rows_at_all(tmp_path: Path, compression: str) -> None:
    (tmp_path / "in").mkdir()
    feather.write_feather(TABLE, str(tmp_path / "in" / "a.feather"), compression=compression)
    feather.write_feather(TABLE.slice(0, 0), str(tmp_path / "in" / "b.feather"), compression=compression)
    job = make_job(tmp_path, quality={"max_reject_rate": 1})
    assert run_fake(job).counts.rows_out == 3


def test_a_dataset_saved_on_disk_is_read_and_what_describes_it_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder / "data-00000-of-00002.arrow", TABLE.slice(0, 1), stream=True)
    write(folder / "data-00001-of-00002.arrow", TABLE.slice(2), stream=True)
    write(folder / "cache-0123.arrow", TABLE, stream=True)
    write_files(tmp_path, {"state.json": "{}", "dataset_info.json": '{\n"a": 1\n}', "README.md": "x"})
    job = make_job(tmp_path, input={"id": "id"})
    assert dict(make_run(job).plan().skipped) == {
        "beside tables (.json or .md)": 3,
        "cache of datasets (cache-*.arrow)": 1,
    }
    run_fake(job)
    assert [row["id"] for row in published(job)] == ["1", "3", "4"]


def test_notes_and_objects_away_from_tables_are_read(tmp_path: Path) -> None:
    write(tmp_path / "in" / "tables" / "a.arrow", TABLE.select(["text"]).slice(0, 1))
    write_files(tmp_path, {"b.json": jsonl(["b"]), "c.md": "c"})
    assert run_fake(make_job(tmp_path)).counts.rows_out == 3


def test_damage_is_told_and_a_missing_column_named(tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "a.arrow")
    with pytest.raises(InputNotFoundError, match=r"no column 'body'; it has: text, id, k"):
        make_run(make_job(tmp_path, input={"text": "body"})).plan()
    path.write_bytes(b"nonsense")
    with pytest.raises(UnreadableFileError, match=r"a\.arrow: not a readable Arrow IPC file"):
        make_run(make_job(tmp_path)).plan()
    write(path, stream=True)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"a\.arrow: damaged"):
        read_all(InputSpec(uri=str(path)))


WORDS = pa.array(["a", "a", "b"])


@pytest.mark.parametrize(
    "column",
    [
        WORDS.cast(pa.large_string()),
        WORDS.cast(pa.string_view()),
        WORDS.cast(pa.binary()),
        WORDS.cast(pa.binary_view()),
        WORDS.dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"])),
        pa.ExtensionArray.from_storage(pa.json_(), WORDS),
    ],
    ids=lambda column: str(column.type),
)
def test_every_arrow_type_that_holds_text(tmp_path: Path, column: pa.Array) -> None:
    write(tmp_path / "in" / "a.arrow", pa.table({"text": column, "id": column}))
    job = make_job(tmp_path, input={"id": "id"})
    run_fake(job)
    assert [row["id"] for row in published(job)] == ["a", "a", "b"]


def test_a_stream_that_is_cut_anywhere_inside_a_message_is_damaged(tmp_path: Path) -> None:
    """Subtle: between two messages a stream may end, by its own rules."""
    path = write(tmp_path / "a.arrow", stream=True)
    content = path.read_bytes()
    ends = 0
    for length in range(len(content) - 9, 8, -1):
        path.write_bytes(content[:length])
        try:
            read_all(InputSpec(uri=str(path)))
        except DataError as exc:
            assert "a.arrow: " in str(exc)  # noqa: PT017 (which lengths are ends of messages is Arrow's matter)
        else:
            ends += 1
    assert ends <= 2
