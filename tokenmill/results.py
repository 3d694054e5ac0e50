"""What each task stores of a row: its columns, and how the model's values become them. No torch.

    embed      V dimensions        -> embedding
    classify   a score a label     -> label, score, and on request labels (multi-label) and scores
    rank       one score           -> score
    score      sum of nll, tokens  -> nll, num_scored, perplexity

Legend: N rows, V values of a row (`BackendInfo.num_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.schemas import classify_fields, embed_fields, rank_fields, score_fields

ValuesNV = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultColumns:
    """The columns of one task.

    stored: the type that values are held in; a row with a value that it cannot hold is a reject.
    make: the columns' arrays, from the values of good rows, shape (N, V).
    """

    fields: tuple[pa.Field, ...]
    stored: npt.DTypeLike
    make: Callable[[ValuesNV], list[pa.Array]]


def embed_columns(num_values: int, dtype: str) -> ResultColumns:
    """dtype: "float32" or "float16"."""
    fields = embed_fields(num_values, dtype)
    (vector,) = fields

    def make(values_NV: ValuesNV) -> list[pa.Array]:
        return [pa.FixedSizeListArray.from_arrays(pa.array(values_NV.reshape(-1)), type=vector.type)]

    return ResultColumns(fields=fields, stored=np.dtype(dtype), make=make)


def classify_columns(
    labels: Sequence[str], *, all_scores: bool = False, threshold: float | None = None
) -> ResultColumns:
    """labels: their names, in the model's order.

    threshold: of a model with several labels a row, the score from which a label holds.
    """
    fields = classify_fields(labels, several=threshold is not None, all_scores=all_scores)
    names_V = np.array(labels, dtype=object)

    def make(values_NV: ValuesNV) -> list[pa.Array]:
        best_N = values_NV.argmax(axis=1)
        arrays = [
            pa.array(names_V[best_N], pa.string()),
            pa.array(values_NV[np.arange(len(values_NV)), best_N]),
        ]
        if threshold is not None:
            chosen = [names_V[row_V].tolist() for row_V in values_NV >= threshold]
            arrays.append(pa.array(chosen, pa.list_(pa.string())))
        if all_scores:
            columns = [pa.array(values_NV[:, place]) for place in range(len(labels))]
            arrays.append(pa.StructArray.from_arrays(columns, fields=list(fields[-1].type)))
        return arrays

    return ResultColumns(fields=fields, stored=np.float32, make=make)


def rank_columns() -> ResultColumns:
    return ResultColumns(
        fields=rank_fields(), stored=np.float32, make=lambda values_N1: [pa.array(values_N1[:, 0])]
    )


def score_columns() -> ResultColumns:
    """Perplexity is null for a row of which nothing was scored."""

    def make(values_N2: ValuesNV) -> list[pa.Array]:
        nll_N, num_N = values_N2.T
        mean_N = np.divide(nll_N, num_N, out=np.full(len(nll_N), np.nan), where=num_N > 0)
        with np.errstate(over="ignore"):
            perplexity_N = np.exp(mean_N)
        return [
            pa.array(nll_N),
            pa.array(num_N.astype(np.int32)),
            pa.array(perplexity_N, mask=num_N == 0),
        ]

    return ResultColumns(fields=score_fields(), stored=np.float64, make=make)
