"""Group-by against a naive oracle, whatever the type and the name of the column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import DataError, StoreUnavailableError, TokenmillError
from tokenmill.groups import group_rows
from tokenmill.schemas import embed_fields, results_schema

D = 3


def results(columns: dict[str, pa.Array], tokens: list[int], vectors: np.ndarray) -> pa.RecordBatch:
    count = len(tokens)
    schema = results_schema(
        {name: c.type for name, c in columns.items()}, embed_fields(D, str(vectors.dtype))
    )
    arrays = [
        pa.array(["f"] * count),
        pa.array(range(count), pa.int64()),
        pa.nulls(count, pa.string()),
        *columns.values(),
        pa.array(tokens, pa.int32()),
        pa.array([0] * count, pa.int32()),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=schema.field("embedding").type),
    ]
    return pa.record_batch(arrays, schema=schema)


row = st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 2), st.integers(1, 9))
rows = st.lists(row, max_size=25)


@settings(max_examples=25)
@given(rows, st.integers(0, 25), st.sampled_from(["float32", "float16"]))
def test_groups_are_those_of_a_plain_loop(rows: list[tuple], cut: int, dtype: str) -> None:
    vectors = np.random.default_rng(len(rows)).standard_normal((len(rows), D)).astype(dtype)
    columns = {
        "k": pa.array([k for k, _, _ in rows], pa.string()),
        "n": pa.array([n for _, n, _ in rows], pa.int64()),
    }
    batch = results(columns, [tokens for _, _, tokens in rows], vectors)
    pieces = [batch.slice(0, cut), batch.slice(cut)]
    table = group_rows(lambda: iter(pieces), batch.schema, ["k", "n"], "embed")
    expected = defaultdict(list)
    for place, (k, n, _) in enumerate(rows):
        expected[k, n].append(place)
    order = sorted(expected, key=lambda key: (key[0] is None, key[0] or "", key[1]))
    assert list(zip(table["k"].to_pylist(), table["n"].to_pylist(), strict=True)) == order
    for row, key in zip(table.to_pylist(), order, strict=True):
        places = expected[key]
        tokens = [rows[place][2] for place in places]
        assert (row["num_rows"], row["num_tokens"]) == (len(places), sum(tokens))
        assert row["mean_tokens"] == pytest.approx(sum(tokens) / len(places))
        assert row["centroid"] == pytest.approx(vectors[places].astype(np.float64).mean(axis=0), abs=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["x", None, "x"]),
        pa.array([3, 1, 3], pa.uint8()),
        pa.array([True, None, True]),
        pa.array([0, 5, 0], pa.timestamp("us", "Europe/Paris")),
        pa.array([0, 5, 0], pa.date32()),
        pa.array([b"x", b"y", b"x"]),
        pa.array([0.5, 1.5, 0.5], pa.float16()),
        pa.array([[1], [2], [1]], pa.list_(pa.int32())),
        pa.nulls(3),
    ],
    ids=lambda values: str(values.type),
)
def test_group_columns_keep_their_type(values: pa.Array) -> None:
    batch = results({"k": values}, [1, 2, 3], np.ones((3, D), np.float32))
    table = group_rows(lambda: iter([batch]), batch.schema, ["k"], "embed")
    assert table.schema.field("k").type == values.type
    assert sum(table["num_rows"].to_pylist()) == 3


@pytest.mark.parametrize("name", ["ID", "Num_Tokens", "Embedding", 'say "hi"', "a.b", "order", "g1", ""])
def test_a_group_column_may_have_any_name(name: str) -> None:
    batch = results({name: pa.array(["x", "y", "x"])}, [1, 2, 3], np.ones((3, D), np.float32))
    table = group_rows(lambda: iter([batch]), batch.schema, [name], "embed")
    assert table[name].to_pylist() == ["x", "y"]
    assert table["num_tokens"].to_pylist() == [4, 2]


def test_the_same_results_give_the_same_groups_to_the_last_bit() -> None:
    vectors = np.random.default_rng(1).standard_normal((5000, D)).astype(np.float32)
    batch = results({"k": pa.array([str(n % 7) for n in range(5000)])}, [1] * 5000, vectors)
    first = group_rows(lambda: iter([batch]), batch.schema, ["k"], "embed")
    pieces = [batch.slice(start, 700) for start in range(0, 5000, 700)]
    assert group_rows(lambda: iter(pieces), batch.schema, ["k"], "embed").equals(first)


@pytest.mark.parametrize("error", [StoreUnavailableError("reading x: SlowDown"), DataError("x: damaged")])
def test_an_error_of_the_rows_stays_what_it_is(error: TokenmillError) -> None:
    """DuckDB lies between: a retry is decided by the type."""
    batch = results({"k": pa.array(["a"])}, [1], np.ones((1, D), np.float32))

    def rows() -> Iterator[pa.RecordBatch]:
        yield batch
        raise error

    with pytest.raises(type(error)) as caught:
        group_rows(rows, batch.schema, ["k"], "embed")
    assert caught.value is error


COUNTS = {"num_rows": 2, "num_tokens": 5, "mean_tokens": 2.5}


@pytest.mark.parametrize(
    ("task", "columns", "figures"),
    [
        ("classify", {"label": ["good", "bad"]}, {"label_counts": [("bad", 1), ("good", 1)]}),
        ("rank", {"score": pa.array([0.25, 0.75], pa.float32())}, {"mean_score": 0.5}),
        (
            "score",
            {"nll": [np.log(2) * 3, np.log(2)], "num_scored": pa.array([3, 1], pa.int32())},
            {"num_scored": 4, "perplexity": pytest.approx(2)},
        ),
        (
            "score",
            {"nll": [0.0, 0.0], "num_scored": pa.array([0, 0], pa.int32())},
            {"num_scored": 0, "perplexity": None},
        ),
    ],
)
def test_every_task_has_figures_of_its_own(task: str, columns: dict, figures: dict) -> None:
    batch = pa.record_batch({"k": ["a", "a"], "num_tokens": pa.array([2, 3], pa.int32()), **columns})
    table = group_rows(lambda: iter([batch]), batch.schema, ["k"], task)
    assert table.to_pylist() == [{"k": "a", **COUNTS, **figures}]
