"""Parts: any reader opens them, damage is an error, row groups are bounded, bytes are repeatable."""
# ruff: noqa: PT012 (what happens when a block fails is the subject)

from __future__ import annotations

import io
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import new_folder

from tokenmill import parquet
from tokenmill.errors import DataError, StoreError
from tokenmill.parquet import create_part, iter_part, part_footer, sha256_of
from tokenmill.schemas import embed_fields, kept_columns, results_schema, tokens_schema
from tokenmill.store import Store

SCHEMA = tokens_schema({"lang": pa.string(), "label": pa.int64()})


def token_rows(count: int, start: int = 0) -> pa.RecordBatch:
    numbers = range(start, start + count)
    columns = {
        "source_file": ["f"] * count,
        "row_ordinal": list(numbers),
        "id": [None if n % 3 else str(n) for n in numbers],
        "lang": ["en" if n % 2 else None for n in numbers],
        "label": list(numbers),
        "chunk_index": [0] * count,
        "input_ids": [list(range(n % 5)) for n in numbers],
        "num_tokens": [n % 5 for n in numbers],
        "num_tokens_dropped": [0] * count,
        "num_unknown": [0] * count,
    }
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)


def write(
    store: Store, name: str, batches: list[pa.RecordBatch], schema: pa.Schema = SCHEMA, **options: int
) -> parquet.FileInfo:
    with create_part(store, name, schema, {"job": "j", "shard_key": "k"}, **options) as part:
        for batch in batches:
            part.write(batch)
    assert part.info is not None
    return part.info


def rows_of(store: Store, name: str) -> list[dict]:
    return [row for batch in iter_part(store, name) for row in batch.to_pylist()]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_rows_come_back_in_order_and_row_groups_are_bounded(sizes: list[int], group_rows: int) -> None:
    with new_folder() as folder:
        store = Store.open(str(folder))
        batches = [token_rows(size, 10 * number) for number, size in enumerate(sizes)]
        info = write(store, "a.parquet", batches, group_rows=group_rows)
        assert rows_of(store, "a.parquet") == [row for batch in batches for row in batch.to_pylist()]
        metadata = pq.read_metadata(folder / "a.parquet")
        groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        assert all(rows <= group_rows for rows in groups)
        assert groups[:-1] == [group_rows] * (len(groups) - 1)
        assert (info.rows, info.bytes) == (sum(sizes), (folder / "a.parquet").stat().st_size)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_the_same_rows_give_the_same_bytes_however_they_arrive(sizes: list[int]) -> None:
    with new_folder() as folder:
        store = Store.open(str(folder))
        whole = token_rows(sum(sizes))
        starts = np.cumsum([0, *sizes]).tolist()
        pieces = [whole.slice(start, size) for start, size in zip(starts, sizes, strict=False)]
        assert write(store, "a", pieces).sha256 == write(store, "b", [whole]).sha256 == sha256_of(store, "a")


def test_row_groups_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 2000)
    write(Store.open(str(tmp_path)), "a", [token_rows(1, n) for n in range(200)])
    assert pq.read_metadata(tmp_path / "a").num_row_groups > 3


def test_the_footer_says_what_the_part_is(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    write(store, "a", [token_rows(3)])
    schema, rows = part_footer(store, "a")
    assert rows == 3
    assert schema.equals(SCHEMA)
    assert schema.metadata[b"tokenmill.job"] == b"j"
    assert schema.metadata[b"tokenmill.shard_key"] == b"k"
    assert kept_columns(schema) == {"lang": pa.string(), "label": pa.int64()}


def test_settings_of_a_part_are_those_that_were_decided(tmp_path: Path) -> None:
    write(Store.open(str(tmp_path)), "a", [token_rows(50)])
    group = pq.read_metadata(tmp_path / "a").row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "RLE_DICTIONARY" not in columns["input_ids.list.element"].encodings
    assert "RLE_DICTIONARY" in columns["source_file"].encodings


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_reader_opens_results(tmp_path: Path, dtype: str) -> None:
    schema = results_schema({"lang": pa.string()}, embed_fields(4, dtype))
    vectors = np.arange(12, dtype=dtype).reshape(3, 4)
    arrays = [
        pa.array(["f"] * 3),
        pa.array(range(3), pa.int64()),
        pa.nulls(3, pa.string()),
        pa.array(["en", None, "de"]),
        pa.array([2] * 3, pa.int32()),
        pa.array([0] * 3, pa.int32()),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=schema.field("embedding").type),
    ]
    write(Store.open(str(tmp_path)), "a.parquet", [pa.record_batch(arrays, schema=schema)], schema)
    path = str(tmp_path / "a.parquet")
    assert np.stack(pd.read_parquet(path)["embedding"]).tolist() == vectors.tolist()
    assert duckdb.sql(f"SELECT lang, embedding[2] FROM '{path}'").fetchall() == [
        ("en", 1.0),
        (None, 5.0),
        ("de", 9.0),
    ]
    import datasets

    loaded = datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path / "cache"))
    assert np.array(loaded["embedding"][:]).tolist() == vectors.tolist()
    encodings = pq.read_metadata(path).row_group(0).column(6).encodings
    assert ("BYTE_STREAM_SPLIT" in encodings) == (dtype == "float32")  # DuckDB cannot, for half floats


def test_a_part_without_rows_has_its_schema(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    assert write(store, "a", []).rows == 0
    assert write(store, "b", [token_rows(0)]).rows == 0
    assert rows_of(store, "a") == []
    assert part_footer(store, "a")[0].equals(SCHEMA)
    assert pd.read_parquet(tmp_path / "a").columns.tolist() == SCHEMA.names


def test_an_error_while_writing_leaves_no_part(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    with pytest.raises(ZeroDivisionError), create_part(store, "a", SCHEMA, {}) as part:
        part.write(token_rows(3))
        raise ZeroDivisionError
    assert store.sizes() == {}
    assert part.info is None


def test_any_flipped_byte_of_a_parts_pages_is_an_error_or_harmless(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    write(store, "a", [token_rows(400)])
    whole, expected = store.read_bytes("a"), rows_of(store, "a")
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    damaged = 0
    for place in range(0, len(whole) - footer, 7):
        content = bytearray(whole)
        content[place] ^= 0x10
        (tmp_path / "a").write_bytes(content)
        try:
            assert rows_of(store, "a") == expected
        except DataError as exc:
            damaged += 1
            assert "delete it and run again" in str(exc)  # noqa: PT017 (either outcome is right)
    assert damaged > 100


def test_what_is_no_parquet_is_unreadable_and_what_is_not_ours_is_told(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.write_bytes("a", b"PAR1 not really PAR1")
    with pytest.raises(DataError, match=r"/a: not a readable Parquet file.*delete it and run again"):
        part_footer(store, "a")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b")
    with pytest.raises(StoreError, match="/b: not written by tokenmill"):
        part_footer(store, "b")


class Failing(io.BytesIO):
    """A file whose storage goes away after its footer was read."""

    gone = False

    def read(self, *args: object) -> bytes:  # type: ignore[override]
        if self.gone:
            raise TimeoutError("storage is gone")
        return super().read(*args)


def test_storage_that_fails_is_not_taken_for_damage() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["x" * 1000] * 1000}), sink, compression="none", use_dictionary=False)
    file = Failing(sink.getvalue())
    with pytest.raises(TimeoutError), parquet.open_parquet(file, "x") as opened:
        file.gone = True
        opened.read()
