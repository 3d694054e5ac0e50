"""Rows of every format: what is clean goes on, what is bad is a reject with a reason, nothing is lost."""

from __future__ import annotations

import codecs
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from outputs import read_all, read_one, write_files

from tokenmill.corpus import Slice, find_corpus
from tokenmill.errors import DataError, UnreadableFileError
from tokenmill.job import InputSpec
from tokenmill.readers import read_slice
from tokenmill.rows import RowBatch
from tokenmill.store import StorageConfig
from tokenmill.testing import make_job, make_run

BOM = codecs.BOM_UTF8


def reasons(batch: RowBatch) -> list[tuple[int, str]]:
    return [(reject.row_ordinal, reject.reason) for reject in batch.rejects]


def ordinals(batch: RowBatch) -> list[int]:
    return batch.columns["row_ordinal"].to_pylist()


# --- Plain text ---


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\n\n\ntwo", ["one", "", "", "two"]),
        (BOM + b"one\n" + BOM + b"two", ["one", "two"]),
        (b"", []),
        (b"\n", [""]),
        (b"NA\nnull\nNone\nnan", ["NA", "null", "None", "nan"]),
        ("\u202eright to left\u202c\u05e9\u05dc\u05d5\u05dd".encode(), ["\u202eright to left\u202cשלום"]),
        ("a\x0bb\x0cc\x85d\u2028e".encode(), ["a\x0bb\x0cc\x85d\u2028e"]),
    ],
)
def test_each_line_of_a_text_file_is_a_row(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    batch = read_one(tmp_path / "a.txt", content)
    assert batch.texts == texts
    assert ordinals(batch) == list(range(len(texts)))
    assert batch.rejects == []


@pytest.mark.parametrize(
    ("content", "texts"), [(b"one\ntwo\n", ["one\ntwo\n"]), (b"", [""]), (BOM + b"x", ["x"])]
)
def test_a_whole_text_file_can_be_one_row(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    assert read_one(tmp_path / "a.md", content, rows="files").texts == texts


@pytest.mark.parametrize("rows", ["lines", "files"])
def test_a_row_longer_than_the_limit_is_a_reject(tmp_path: Path, rows: str) -> None:
    batch = read_one(tmp_path / "a.txt", b"x" * 1025, rows=rows, max_row_bytes=1024)
    assert reasons(batch) == [(0, "row_too_large")]
    assert batch.rejects[0].detail == "longer than input.max_row_bytes = 1024"
    assert read_one(tmp_path / "a.txt", b"x" * 1024, rows=rows, max_row_bytes=1024).texts == ["x" * 1024]


def test_bytes_that_are_not_text_are_rejected_with_their_place(tmp_path: Path) -> None:
    batch = read_one(tmp_path / "a.txt", b"good\nb\xffd\ngood")
    assert batch.texts == ["good", "good"]
    assert reasons(batch) == [(1, "undecodable")]
    assert batch.rejects[0].detail == "not utf-8 at byte 1 of the row"
    assert batch.rejects[0].text == "b\ufffdd"


def test_bytes_that_are_not_text_can_be_replaced_and_are_counted(tmp_path: Path) -> None:
    batch = read_one(tmp_path / "a.txt", b"good\nb\xff\xfed\n\xed\xa0\x80", undecodable="replace")
    assert batch.texts == ["good", "b\ufffd\ufffdd", "\ufffd\ufffd\ufffd"]
    assert (batch.rows_scrubbed, batch.chars_replaced) == (2, 5)


def test_another_encoding_is_read_as_such(tmp_path: Path) -> None:
    assert read_one(tmp_path / "a.txt", "día".encode("latin-1"), encoding="latin-1").texts == ["día"]


def test_a_file_name_that_is_not_utf8_is_read_and_shown(tmp_path: Path) -> None:
    write_files(tmp_path, {"ok.txt": b"a"})
    (tmp_path / "in" / "bad\udcff.txt").write_bytes(b"b\n\xff")
    batches = read_all(InputSpec(uri=str(tmp_path / "in")))
    assert [batch.texts for batch in batches] == [["b"], ["a"]]
    assert batches[0].columns["source_file"].to_pylist()[0].endswith("bad\ufffd.txt")
    assert batches[0].rejects[0].source_file.endswith("bad\ufffd.txt")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_of_several_members_are_read_whole(tmp_path: Path, suffix: str) -> None:
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    content = compress(b"one\ntw") + compress(b"o\nthree")
    assert read_one(tmp_path / f"a.txt{suffix}", content).texts == ["one", "two", "three"]
    with pytest.raises(UnreadableFileError, match="cut short"):
        read_one(tmp_path / f"a.txt{suffix}", content[:-3])


# --- Parquet ---


def parquet_bytes(table: pa.Table, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


TEXTS = ["one", None, "three", "NA"]


@pytest.mark.parametrize(
    "dtype",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_arrow_type_that_holds_text_is_text(tmp_path: Path, dtype: pa.DataType) -> None:
    column = pa.array(TEXTS).cast(dtype)
    table = pa.table({"text": column, "id": column, "lang": column})
    batch = read_one(tmp_path / "a.parquet", table, id="id", keep=["lang"])
    assert batch.texts == ["one", "three", "NA"]
    assert ordinals(batch) == [0, 2, 3]
    assert batch.columns["id"].to_pylist() == ["one", "three", "NA"]
    assert reasons(batch) == [(1, "null_text")]
    kept = batch.columns["lang"]
    assert kept.type == (pa.binary() if "binary" in str(dtype) else pa.string())
    assert kept.cast(pa.string()).to_pylist() == ["one", "three", "NA"]


def test_null_texts_can_count_as_empty(tmp_path: Path) -> None:
    batch = read_one(tmp_path / "a.parquet", pa.table({"text": TEXTS}), nulls="empty")
    assert batch.texts == ["one", "", "three", "NA"]


def test_a_column_of_nothing_but_nulls_is_rejected_row_by_row(tmp_path: Path) -> None:
    batch = read_one(tmp_path / "a.parquet", pa.table({"text": pa.nulls(3)}))
    assert reasons(batch) == [(0, "null_text"), (1, "null_text"), (2, "null_text")]


def invalid_strings() -> pa.Array:
    """A string column whose first value is not UTF-8, as sloppy writers make them."""
    raw = pa.array([b"a\xff", b"ok"], pa.binary())
    return pa.Array.from_buffers(pa.string(), 2, raw.buffers())


@pytest.mark.parametrize("binary", [True, False])
def test_parquet_text_that_is_not_utf8_is_a_reject_that_keeps_its_id(tmp_path: Path, binary: bool) -> None:
    texts = pa.array([b"a\xff", b"ok"], pa.binary()) if binary else invalid_strings()
    batch = read_one(tmp_path / "a.parquet", pa.table({"text": texts, "n": [7, 8]}), id="n")
    assert batch.texts == ["ok"]
    assert reasons(batch) == [(0, "undecodable")]
    assert batch.rejects[0].id == "7"


def test_ids_and_kept_text_that_are_not_utf8_are_scrubbed_and_counted(tmp_path: Path) -> None:
    table = pa.table({"text": ["x", "y"], "id": invalid_strings(), "k": invalid_strings()})
    batch = read_one(tmp_path / "a.parquet", table, id="id", keep=["k"])
    assert batch.columns["id"].to_pylist() == ["a\ufffd", "ok"]
    assert batch.columns["k"].to_pylist() == ["a\ufffd", "ok"]
    assert (batch.rows_scrubbed, batch.chars_replaced) == (1, 1)


def test_ids_of_any_plain_type_become_text(tmp_path: Path) -> None:
    for values, expected in [
        (pa.array([1, None]), ["1", None]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([b"ab", b"c"]), ["ab", "c"]),
        (pa.array([0, 1], pa.date32()), ["1970-01-01", "1970-01-02"]),
        (
            pa.array([bytes(16), bytes(15) + b"\1"], pa.uuid()),
            [f"{'0' * 8}-0000-0000-0000-{n:012d}" for n in (0, 1)],
        ),
    ]:
        batch = read_one(tmp_path / "a.parquet", pa.table({"text": ["x", "y"], "id": values}), id="id")
        assert batch.columns["id"].to_pylist() == expected


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, None]),
        pa.array([[1.5], [2.5]], pa.list_(pa.float64(), 1)),
        pa.array([["a"], ["b"]], pa.list_(pa.string(), 1)),
        pa.array([[True], [False]], pa.list_(pa.bool_(), 1)),
        pa.array([{"a": 1}, {"a": None}]),
        pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
        pa.array([1, 2], pa.timestamp("us", "Europe/Paris")),
        pa.array([1.5, 2.5], pa.float16()),
        pa.nulls(2),
    ],
    ids=lambda values: str(values.type),
)
def test_kept_columns_are_carried_unchanged_in_their_own_type(tmp_path: Path, values: pa.Array) -> None:
    batch = read_one(tmp_path / "a.parquet", pa.table({"text": ["x", "y"], "k": values}), keep=["k"])
    assert batch.columns["k"].equals(values)


@pytest.mark.parametrize("groups", [0, 1])
def test_a_parquet_file_without_rows_still_has_its_columns(tmp_path: Path, groups: int) -> None:
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema) as writer:
        if groups:
            writer.write_table(schema.empty_table())
    batch = read_one(tmp_path / "a.parquet", sink.getvalue(), keep=["n"])
    assert (batch.texts, batch.rejects) == ([], [])
    assert batch.columns.schema.field("n").type == pa.int64()


def test_a_dotted_column_name_is_a_name(tmp_path: Path) -> None:
    table = pa.table({"a.b": ["x"], "a": [{"b": 1}], "c.d": [1]})
    batch = read_one(tmp_path / "a.parquet", table, text="a.b", keep=["c.d"])
    assert batch.texts == ["x"]
    assert batch.columns["c.d"].to_pylist() == [1]


def test_one_column_may_be_text_and_id_and_kept(tmp_path: Path) -> None:
    batch = read_one(tmp_path / "a.parquet", pa.table({"t": ["x"]}), text="t", id="t", keep=["t"])
    assert (batch.texts, batch.columns["id"].to_pylist(), batch.columns["t"].to_pylist()) == (
        ["x"],
        ["x"],
        ["x"],
    )


def test_the_row_limit_counts_bytes_not_characters(tmp_path: Path) -> None:
    texts = ["é" * 512, "é" * 513, "x" * 1025]
    for name, content in {
        "a.parquet": pa.table({"text": texts}),
        "a.csv": "text\n" + "\n".join(texts),
    }.items():
        batch = read_one(tmp_path / name, content, max_row_bytes=1024)
        assert batch.texts == texts[:1]
        assert reasons(batch) == [(1, "row_too_large"), (2, "row_too_large")]
    blob = pa.table({"text": pa.array([b"\xff" * 2000])})
    assert reasons(read_one(tmp_path / "b.parquet", blob, max_row_bytes=1024)) == [(0, "row_too_large")]


MEGABYTE = [chr(65 + n) * (1 << 20) for n in range(20)]
REPEATED = pa.DictionaryArray.from_arrays(pa.array([0] * 20, pa.int32()), pa.array(MEGABYTE[:1]))


@pytest.mark.parametrize("column", [pa.array(MEGABYTE), REPEATED, pa.array(MEGABYTE[:1] * 20)])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_long_texts_are_read_a_few_at_a_time(tmp_path: Path, column: pa.Array, kind: str) -> None:
    """A text that repeats is stored once: neither the file nor its footer tells how much there is to read."""
    table, sink = pa.table({"text": column}), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_files(tmp_path, {f"a.{kind}": table if kind == "parquet" else sink.getvalue()})
    run = make_run(make_job(tmp_path))
    (piece,) = (piece for shard in run.plan().shards for piece in shard.slices)
    sizes = [len(batch.texts) for batch in read_slice(piece, run.job.input, StorageConfig())]
    assert sum(sizes) == 20
    assert max(sizes) <= 16


def test_a_slice_reads_its_own_row_groups_and_numbers_them_on(tmp_path: Path) -> None:
    content = parquet_bytes(pa.table({"text": [str(n) for n in range(10)]}), row_group_size=2)
    write_files(tmp_path, {"a.parquet": content})
    spec = InputSpec(uri=str(tmp_path / "in" / "a.parquet"))
    file = find_corpus(spec, StorageConfig()).files[0]
    piece = Slice(file=file, first_group=1, num_groups=2, first_row=2, num_rows=4, text_bytes=8)
    batches = list(read_slice(piece, spec, StorageConfig()))
    assert [text for batch in batches for text in batch.texts] == ["2", "3", "4", "5"]
    assert [n for batch in batches for n in ordinals(batch)] == [2, 3, 4, 5]


def test_a_file_cut_anywhere_is_an_error_of_ours(tmp_path: Path) -> None:
    whole = parquet_bytes(pa.table({"text": ["some text"] * 50}))
    for size in [0, 3, 4, len(whole) // 2, len(whole) - 5, len(whole) - 1]:
        with pytest.raises(UnreadableFileError, match=r"a\.parquet: not a readable Parquet file"):
            read_one(tmp_path / "a.parquet", whole[:size])


def test_flipped_bits_under_a_page_checksum_are_never_values(tmp_path: Path) -> None:
    table = pa.table({"text": [f"some text {n}" for n in range(50)]})
    whole = parquet_bytes(table, write_page_checksum=True, compression="none", use_dictionary=False)
    footer = int.from_bytes(whole[-8:-4], "little")
    for place in range(4, len(whole) - 8 - footer, 37):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        try:
            batch = read_one(tmp_path / "a.parquet", bytes(damaged))
        except DataError:
            continue
        assert batch.texts == table["text"].to_pylist()


def test_a_file_replaced_after_planning_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"12345"})
    spec = InputSpec(uri=str(tmp_path / "in"))
    piece = Slice(file=find_corpus(spec, StorageConfig()).files[0], text_bytes=5)
    (tmp_path / "in" / "new.txt").write_bytes(b"54321")
    (tmp_path / "in" / "new.txt").rename(tmp_path / "in" / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt: changed while the job ran"):
        list(read_slice(piece, spec, StorageConfig()))
