"""Proof that published vectors mean something: what is near a question, and do documents find themselves.

Exact, by brute force: results are streamed, never held.  Cosine similarity throughout.
Legend: Q queries, B rows of a batch, K neighbours kept, D dimensions.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.backend import Backend
from tokenmill.engine import Run
from tokenmill.errors import ConfigError
from tokenmill.manifest import Manifest, read_manifest
from tokenmill.parquet import iter_part
from tokenmill.plan import Plan
from tokenmill.readers import read_slice
from tokenmill.store import Store
from tokenmill.vectors import embed_texts

Floats = npt.NDArray[np.float32]

KEY_COLUMNS = ("source_file", "row_ordinal", "id")
SAME_SCORE = 1e-5  # rows that score within this of each other are taken for equal
FIRST_SENTENCE = re.compile(r"\s*(?P<sentence>\S.*?)(?:(?<=[.!?])\s|\n\s*\n|\s*\Z)", re.DOTALL)
MIN_SENTENCE_CHARS = 20  # "Alias." says nothing that could be found again


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKey:
    """Which row of the corpus."""

    source_file: str
    row_ordinal: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A row near a query. score: cosine, -1 to 1.  id: the corpus's own, if the job names one."""

    key: RowKey
    id: str | None
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """How often a document is among the `top` rows nearest to its own first sentence.

    chance: what rows in random order would reach.
    """

    num_queries: int
    num_rows: int
    top: int
    num_found: int

    @property
    def recall(self) -> float:
        return self.num_found / self.num_queries if self.num_queries else 0.0

    @property
    def chance(self) -> float:
        return min(1.0, self.top / self.num_rows) if self.num_rows else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "num_queries": self.num_queries,
            "num_rows": self.num_rows,
            "top": self.top,
            "num_found": self.num_found,
            "recall": self.recall,
            "chance": self.chance,
        }


def answers(
    run: Run, queries: Sequence[str], top: int = 5, backend: Backend | None = None
) -> list[list[Neighbour]]:
    """The rows of the published dataset nearest to each query text, best first.

    Raises ConfigError if nothing is published.
    """
    vectors_QD = embed_texts(run.setup, queries, backend)
    return nearest(run.store, _published(run.store), vectors_QD, top)


def nearest(store: Store, manifest: Manifest, queries_QD: Floats, top: int) -> list[list[Neighbour]]:
    """The `top` published rows nearest to each query vector, best first; equal scores in corpus order."""
    best: list[list[tuple[float, int, Neighbour]]] = [[] for _ in queries_QD]
    place = 0
    for rows, scores_QB in _scored(store, manifest, queries_QD):
        for heap, scores_B in zip(best, scores_QB, strict=True):
            for row in np.argsort(-scores_B, kind="stable")[:top].tolist():
                entry = (float(scores_B[row]), -(place + row), _neighbour(rows, row, float(scores_B[row])))
                if len(heap) < top:
                    heapq.heappush(heap, entry)
                elif entry[:2] > heap[0][:2]:
                    heapq.heapreplace(heap, entry)
        place += len(rows)
    return [[entry[2] for entry in sorted(heap, key=lambda e: e[:2], reverse=True)] for heap in best]


def self_retrieval(
    run: Run, plan: Plan, sample: int = 200, top: int = 10, backend: Backend | None = None
) -> Recall:
    """Ask for documents by their own first sentence: a share that falls if anything is mixed up.

    sample: at most so many documents whose first sentence is shorter than they are, chosen by a hash
    of their place, so that the same corpus gives the same figure.
    A document ties with rows of the same text: it counts as found unless `top` rows are nearer.
    Raises ConfigError if nothing is published.
    """
    manifest = _published(run.store)
    chosen = _sample(run, plan, sample)
    queries_QD = embed_texts(run.setup, list(chosen.values()), backend)
    return Recall(
        num_queries=len(chosen),
        num_rows=sum(file.rows for file in manifest.results),
        top=top,
        num_found=sum(rank <= top for rank in _ranks(run.store, manifest, queries_QD, list(chosen))),
    )


def first_sentence(text: str) -> str | None:
    """The first sentence on one line; None if it is all of the text, or too short to ask for.

    Example: "Return the sum of\\n    all items.  Slow." -> "Return the sum of all items."
    """
    match = FIRST_SENTENCE.match(text)
    if match is None or match.end() >= len(text.rstrip()):
        return None
    sentence = " ".join(match["sentence"].split())
    return sentence if len(sentence) >= MIN_SENTENCE_CHARS else None


def texts_by_id(run: Run, plan: Plan, ids: Sequence[str]) -> dict[str, str]:
    """Texts of the rows with these ids, read from the corpus. An id that is not there is left out."""
    wanted = set(ids)
    return {
        row_id: text for _, row_id, text in _corpus_rows(run, plan) if row_id is not None and row_id in wanted
    }


def _published(store: Store) -> Manifest:
    manifest = read_manifest(store)
    if manifest is None:
        raise ConfigError(f"{store.uri}: nothing is published here; run the job first")
    return manifest


def _corpus_rows(run: Run, plan: Plan) -> Iterator[tuple[RowKey, str | None, str]]:
    for piece in (piece for shard in plan.shards for piece in shard.slices):
        for batch in read_slice(piece, run.job.input, run.storages.input):
            columns = (batch.columns[name].to_pylist() for name in KEY_COLUMNS)
            for source_file, row_ordinal, row_id, text in zip(*columns, batch.texts, strict=True):
                yield RowKey(source_file=source_file, row_ordinal=row_ordinal), row_id, text


def _sample(run: Run, plan: Plan, size: int) -> dict[RowKey, str]:
    """First sentences of the documents whose places have the smallest hashes."""
    asked = (
        (hashlib.sha256(f"{number}".encode()).digest(), key, sentence)
        for number, (key, _, text) in enumerate(_corpus_rows(run, plan))
        if (sentence := first_sentence(text)) is not None
    )
    return {key: sentence for _, key, sentence in heapq.nsmallest(size, asked, key=lambda entry: entry[0])}


def _scored(
    store: Store, manifest: Manifest, queries_QD: Floats
) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.float32]]]:
    """Published rows in corpus order, with the cosine of each to each query, shape (Q, B)."""
    unit_QD = _unit(queries_QD)
    for file in manifest.results:
        for rows in iter_part(store, file.path, [*KEY_COLUMNS, "embedding"]):
            flat = rows["embedding"].flatten().to_numpy(zero_copy_only=False)
            vectors_BD = flat.reshape(len(rows), -1).astype(np.float32)
            yield rows, unit_QD @ _unit(vectors_BD).T


def _unit(vectors_ND: Floats) -> Floats:
    """Vectors of length one; zero vectors stay as they are."""
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return (vectors_ND / np.where(lengths_N1 == 0, 1, lengths_N1)).astype(np.float32)


def _neighbour(rows: pa.RecordBatch, row: int, score: float) -> Neighbour:
    source_file, row_ordinal, row_id = (rows[name][row].as_py() for name in KEY_COLUMNS)
    return Neighbour(key=RowKey(source_file=source_file, row_ordinal=row_ordinal), id=row_id, score=score)


def _ranks(store: Store, manifest: Manifest, queries_QD: Floats, keys: Sequence[RowKey]) -> Iterator[int]:
    """Rank of each query's own row: 1 plus the rows that are nearer. Rejected rows are left out."""
    own = _own_scores(store, manifest, queries_QD, keys)
    asked = np.array(sorted(own), dtype=np.int64)
    limits_Q1 = np.array([own[query] for query in asked.tolist()], dtype=np.float32)[:, None] + SAME_SCORE
    nearer_Q = np.zeros(len(asked), dtype=np.int64)
    for _, scores_QB in _scored(store, manifest, queries_QD[asked]):
        nearer_Q += (scores_QB > limits_Q1).sum(axis=1)
    yield from (nearer_Q + 1).tolist()


def _own_scores(
    store: Store, manifest: Manifest, queries_QD: Floats, keys: Sequence[RowKey]
) -> dict[int, float]:
    """Score of each query with the row of its own key, by query number."""
    numbers = {key: number for number, key in enumerate(keys)}
    own: dict[int, float] = {}
    for rows, scores_QB in _scored(store, manifest, queries_QD):
        places = zip(rows["source_file"].to_pylist(), rows["row_ordinal"].to_pylist(), strict=True)
        for row, (source_file, row_ordinal) in enumerate(places):
            number = numbers.get(RowKey(source_file=source_file, row_ordinal=row_ordinal))
            if number is not None:
                own[number] = float(scores_QB[number, row])
    return own
