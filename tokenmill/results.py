"""What each task stores of a row: its columns, and how the model's values become them. No torch.

    embed      V dimensions        -> embedding
    classify   a score a label     -> label, score, and on request labels (multi-label) and scores
    rank       one score           -> score
    score      sum of nll, tokens  -> nll, num_scored, perplexity

Legend: N rows, C chunks of them, V values of each (`BackendInfo.num_values`).
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
Int64s = npt.NDArray[np.int64]
Pool = Callable[[ValuesNV, Int64s, Int64s], ValuesNV]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultColumns:
    """The columns of one task.

    stored: the type that values are held in; a row with a value that it cannot hold is a reject.
    make: the columns' arrays, from the values of good rows, shape (N, V).
    pool: the values of texts from those of their chunks, (C, V) -> (N, V), given how many tokens each
    chunk has and at which chunk each text begins.
    """

    fields: tuple[pa.Field, ...]
    stored: npt.DTypeLike
    make: Callable[[ValuesNV], list[pa.Array]]
    pool: Pool


def _sums(values_CV: ValuesNV, weights_C: Int64s, starts_N: Int64s) -> ValuesNV:
    del weights_C
    return np.add.reduceat(values_CV, starts_N)


def _highest(values_CV: ValuesNV, weights_C: Int64s, starts_N: Int64s) -> ValuesNV:
    del weights_C
    highest_NV: ValuesNV = np.maximum.reduceat(values_CV, starts_N)
    return highest_NV


def _means(values_CV: ValuesNV, weights_C: Int64s, starts_N: Int64s) -> ValuesNV:
    """Weighted by length."""
    sums_NV = np.add.reduceat(values_CV.astype(np.float64) * weights_C[:, None], starts_N)
    means_NV: ValuesNV = (sums_NV / np.add.reduceat(weights_C, starts_N)[:, None]).astype(values_CV.dtype)
    return means_NV


def _unit_means(values_CV: ValuesNV, weights_C: Int64s, starts_N: Int64s) -> ValuesNV:
    """Of unit length again, where there is any."""
    means_NV = _means(values_CV.astype(np.float64), weights_C, starts_N)
    norms_N1 = np.linalg.norm(means_NV, axis=1, keepdims=True)
    unit_NV: ValuesNV = (means_NV / np.maximum(norms_N1, 1e-12)).astype(values_CV.dtype)
    return unit_NV


def embed_columns(num_values: int, dtype: str, *, normalize: bool = False) -> ResultColumns:
    """dtype: "float32" or "float16".  normalize: whether vectors have unit length."""
    fields = embed_fields(num_values, dtype)
    (vector,) = fields

    def make(values_NV: ValuesNV) -> list[pa.Array]:
        return [pa.FixedSizeListArray.from_arrays(pa.array(values_NV.reshape(-1)), type=vector.type)]

    pool = _unit_means if normalize else _means
    return ResultColumns(fields=fields, stored=np.dtype(dtype), make=make, pool=pool)


def classify_columns(
    labels: Sequence[str], *, all_scores: bool = False, threshold: float | None = None, pool: str = "mean"
) -> ResultColumns:
    """labels: their names, in the model's order.

    threshold: of a model with several labels a row, the score from which a label holds.
    pool: "mean" or "max" of the chunks of a text.
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

    return ResultColumns(
        fields=fields, stored=np.float32, make=make, pool=_highest if pool == "max" else _means
    )


def rank_columns() -> ResultColumns:
    """Pairs are never in chunks."""
    return ResultColumns(
        fields=rank_fields(),
        stored=np.float32,
        make=lambda values_N1: [pa.array(values_N1[:, 0])],
        pool=_highest,
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

    return ResultColumns(fields=score_fields(), stored=np.float64, make=make, pool=_sums)
