"""What the gates look at is what a slow and obvious reading of the rows gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import gate_figures
from tokenmill.gate_figures import iter_frames, result_figures, row_steps, token_figures
from tokenmill.parquet import create_part
from tokenmill.schemas import embed_fields, results_schema, tokens_schema
from tokenmill.store import Store

rows_of_ids = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=20)
keys = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=30)


def token_batch(rows: Sequence[Sequence[int | None]]) -> pa.RecordBatch:
    schema = tokens_schema({})
    lengths = pa.array([len(row) for row in rows], pa.int32())
    zeros = pa.array([0] * len(rows), pa.int32())
    columns = [
        pa.array(["a"] * len(rows), pa.string()),
        pa.array(range(len(rows)), pa.int64()),
        pa.nulls(len(rows), pa.string()),
        zeros,
        pa.array(list(map(list, rows)), pa.list_(pa.int32())).cast(schema.field("input_ids").type),
        lengths,
        zeros,
        zeros,
    ]
    return pa.record_batch(columns, schema=schema)


def result_batch(files: Sequence[str], ordinals: Sequence[int], vectors: object) -> pa.RecordBatch:
    values = np.asarray(vectors, np.float32)
    schema = results_schema({}, embed_fields(values.shape[1], "float32"))
    zeros = pa.array([0] * len(files), pa.int32())
    vector = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=schema.field("embedding").type)
    ids = pa.nulls(len(files), pa.string())
    columns = [pa.array(files, pa.string()), pa.array(ordinals, pa.int64()), ids, zeros, zeros, vector]
    return pa.record_batch(columns, schema=schema)


@given(rows_of_ids, st.integers(0, 3))
def test_the_ids_of_a_row_are_summed_up_as_a_loop_does(rows: list[list[int]], start: int) -> None:
    batch = token_batch(rows).slice(start)
    found = token_figures()(batch)
    expected = [(min(row, default=0), max(row, default=0), len(row)) for row in rows[start:]]
    given_rows = zip(
        found["min_id"].tolist(), found["max_id"].tolist(), found["num_ids"].tolist(), strict=True
    )
    assert list(given_rows) == expected


def test_a_null_among_the_ids_is_no_id() -> None:
    lists = pa.array([[5, None, 7], None], pa.list_(pa.int32()))
    counts = pa.array([3, None], pa.int32())
    batch = pa.record_batch({"input_ids": lists, "num_tokens": counts, "num_unknown": counts})
    found = token_figures()(batch)
    assert found["min_id"].tolist() == [-1, 0]
    assert found["num_tokens"].to_pylist() == [3, -1]


@given(keys, st.integers(0, 30))
def test_the_step_of_a_row_is_its_distance_from_the_last_of_its_file(
    rows: list[tuple[str, int]], cut: int
) -> None:
    found, last = [], {}
    for piece in (rows[:cut], rows[cut:]):
        files = pa.array([file for file, _ in piece], pa.string()).dictionary_encode()
        found += row_steps(files, np.array([n for _, n in piece], np.int64), last).tolist()
    seen: dict[str, int] = {}
    expected = []
    for file, ordinal in rows:
        expected.append(ordinal - seen.get(file, ordinal - 1))
        seen[file] = ordinal
    assert (found, last) == (expected, seen)


def test_rows_of_a_null_file_are_counted_as_one_file() -> None:
    files = pa.array([None, "a", None], pa.string()).dictionary_encode()
    assert row_steps(files, np.array([4, 0, 6]), {}).tolist() == [1, 1, 2]


def test_a_vector_is_known_by_its_length_and_by_what_is_no_number() -> None:
    vectors = [[3, 4], [np.nan, 1], [np.inf, -np.inf], [0, 0]]
    found = result_figures(["embedding"])()(result_batch(["a"] * 4, range(4), vectors).slice(0))
    assert found["num_nonfinite"].tolist() == [0, 1, 2, 0]
    assert found["norm"][[0, 3]].tolist() == [5, 0]


def test_a_null_vector_has_no_finite_value() -> None:
    values, nulls = pa.array([1, 0] * 3, pa.float16()), pa.array([False, True, False])
    vectors = pa.FixedSizeListArray.from_arrays(values, 2, mask=nulls)
    rows = {"source_file": ["a"] * 3, "row_ordinal": [0, 1, 2], "embedding": vectors}
    found = result_figures(["embedding"])()(pa.record_batch(rows).slice(1))
    assert found["num_nonfinite"].tolist() == [2, 0]
    assert found["norm"][1] == 1


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_frames_are_the_rows_in_order_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(gate_figures, "BATCH_ROWS", batch_rows)
    store = Store.open(str(tmp_path))
    for shard in range(3):
        with create_part(store, f"{shard}.parquet", tokens_schema({}), {}) as part:
            part.write(token_batch([[shard, n] for n in range(shard * 5)]))
    parts = [(shard, f"{shard}.parquet") for shard in range(3)]
    frames = list(iter_frames(store, parts, ("input_ids", "num_tokens", "num_unknown"), token_figures))
    found = [row for frame in frames for row in zip(frame["shard"], frame["row_ordinal"], strict=True)]
    assert found == [(shard, n) for shard in range(3) for n in range(shard * 5)]
    assert len(frames) == {1: 2, 7: 1, 1000: 1}[batch_rows]


def test_numbers_of_other_tasks_are_taken_as_they_are_and_a_null_is_not_finite() -> None:
    batch = pa.record_batch(
        {
            "source_file": ["a", "a", "b"],
            "row_ordinal": [0, 2, 0],
            "nll": [1.5, None, np.inf],
            "num_scored": pa.array([3, 0, 1], pa.int32()),
        }
    )
    found = result_figures(["nll", "num_scored"])()(batch)
    assert found["row_step"].tolist() == [1, 2, 1]
    assert found["num_nonfinite"].tolist() == [0, 1, 1]
    np.testing.assert_array_equal(found["nll"], [1.5, np.nan, np.inf])
    assert found["num_scored"].tolist() == [3, 0, 1]
