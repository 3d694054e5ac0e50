"""Values of a row as the columns of its task."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from tokenmill.results import classify_columns, embed_columns, rank_columns, score_columns


def rows(columns, values) -> list[dict]:
    stored = np.array(values).astype(columns.stored)
    return pa.record_batch(columns.make(stored), schema=pa.schema(columns.fields)).to_pylist()


def test_a_vector_is_stored_in_the_type_that_was_asked_for() -> None:
    columns = embed_columns(2, "float16")
    assert rows(columns, [[1, 0.1]]) == [{"embedding": [1.0, float(np.float16(0.1))]}]
    assert columns.fields[0].type == pa.list_(pa.field("item", pa.float16(), nullable=False), 2)


def test_the_best_label_the_first_of_equals_and_every_score() -> None:
    found = rows(classify_columns(["a", "b"], all_scores=True), [[0.25, 0.75], [0.5, 0.5]])
    assert found == [
        {"label": "b", "score": 0.75, "scores": {"a": 0.25, "b": 0.75}},
        {"label": "a", "score": 0.5, "scores": {"a": 0.5, "b": 0.5}},
    ]


def test_labels_that_hold_reach_the_threshold() -> None:
    found = rows(classify_columns(["a", "b", "c"], threshold=0.5), [[0.5, 0.75, 0.25], [0.25, 0.125, 0]])
    assert [(row["label"], row["labels"]) for row in found] == [("b", ["a", "b"]), ("a", [])]


def test_no_rows_have_the_same_columns() -> None:
    for columns in (embed_columns(3, "float32"), classify_columns(["a"], all_scores=True, threshold=0.5)):
        assert rows(columns, np.empty((0, 3))) == []


def test_a_rank_is_one_score() -> None:
    assert rows(rank_columns(), [[-2.5]]) == [{"score": -2.5}]


def test_perplexity_is_that_of_the_scored_tokens_and_null_without_any() -> None:
    scored, none = rows(score_columns(), [[math.log(8) * 3, 3], [0, 0]])
    assert scored == {"nll": math.log(8) * 3, "num_scored": 3, "perplexity": pytest.approx(8)}
    assert none == {"nll": 0.0, "num_scored": 0, "perplexity": None}
