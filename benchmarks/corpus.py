"""The benchmark's corpora: real docstrings, each token sequence once, in a fixed order.

Equal texts are left out, so that computing them once gives nobody an advantage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.sizes import Sizes
from tokenmill.cut import wrap_rows
from tokenmill.demo import MODEL
from tokenmill.docstrings import write_corpus
from tokenmill.job import Job
from tokenmill.settle import Setup, prepare

READ_ROWS = 4096
SHARD_ROWS = 3000
MEMORY_SHARDS = 3
WARM_ROWS = 32
MIN_TOKENS_A_ROW = 50  # fewer than docstrings have on average, so that enough rows are read


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A text and the number of tokens that a model sees of it."""

    doc_id: str
    text: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpora:
    """Folders of Parquet files.

    whole: one file a chunk, then the rest, then a small one for warming up.
    job: for the flow.  tiny: a few rows, the same.  once, four_times: for memory.
    """

    whole: Path
    num_chunks: int
    job: Path
    job_tokens: int
    once: Path
    four_times: Path
    tiny: Path


def bench_job(name: str, corpus: Path, out: Path) -> Job:
    """The job that every measurement runs: fp32, all defaults, one shard a row group."""
    return Job.parse(
        {
            "name": name,
            "input": {"uri": str(corpus), "id": "doc_id", "shard_bytes": 1},
            "inference": {"model": MODEL, "precision": "fp32"},
            "output": {"uri": str(out)},
        }
    )


def make_corpora(folder: Path, sizes: Sizes) -> Corpora:
    """Write all corpora below a folder, from one list of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _unique_rows(folder, sizes.corpus_tokens)
    chunks = list(_chunks(rows, sizes.chunk_tokens, sizes.num_chunks))
    rest = rows[sum(len(chunk) for chunk in chunks) :]
    thirds = list(_chunks(rest, sizes.memory_tokens // MEMORY_SHARDS, MEMORY_SHARDS))
    of_job = _take(rest, sizes.job_tokens)
    parts = [*chunks, *_pieces(rest[:-WARM_ROWS], SHARD_ROWS), rest[-WARM_ROWS:]]
    return Corpora(
        whole=_write(folder / "whole", parts),
        num_chunks=len(chunks),
        job=_write(folder / "job", _pieces(of_job, SHARD_ROWS // 3)),
        job_tokens=sum(row.num_tokens for row in of_job),
        once=_write(folder / "once", thirds),
        four_times=_write(
            folder / "four_times", [_altered(third, copy) for copy in range(4) for third in thirds]
        ),
        tiny=_write(folder / "tiny", [rows[:WARM_ROWS]]),
    )


def _unique_rows(folder: Path, num_tokens: int) -> list[Row]:
    """Rows with distinct token sequences, at least `num_tokens` together if there are so many."""
    setup = prepare(bench_job("bench", folder, folder / "unused"))
    path = folder / "docstrings.parquet"
    for max_rows in (num_tokens // MIN_TOKENS_A_ROW, None):
        write_corpus(path, max_rows)
        rows = _take(list(_distinct(path, setup)), num_tokens)
        if sum(row.num_tokens for row in rows) >= num_tokens:
            break
    path.unlink()
    return rows


def _distinct(path: Path, setup: Setup) -> Iterator[Row]:
    tokenizer, max_tokens = setup.tokenize.tokenizer, setup.tokenize.max_tokens
    seen: set[bytes] = set()
    for batch in pq.ParquetFile(path).iter_batches(READ_ROWS, columns=["doc_id", "text"]):
        ids, texts = (batch[name].to_pylist() for name in ("doc_id", "text"))
        cut = wrap_rows(tokenizer.encode(texts), tokenizer.info, max_tokens, "right")
        for number, (doc_id, text) in enumerate(zip(ids, texts, strict=True)):
            tokens = cut.ids[cut.offsets_N1[number] : cut.offsets_N1[number + 1]]
            if tokens.tobytes() not in seen:
                seen.add(tokens.tobytes())
                yield Row(doc_id=doc_id, text=text, num_tokens=len(tokens))


def _take(rows: Sequence[Row], num_tokens: int) -> list[Row]:
    """The first rows that reach a number of tokens together."""
    return next(_chunks(rows, num_tokens, 1), [])


def _chunks(rows: Sequence[Row], num_tokens: int, most: int) -> Iterator[list[Row]]:
    """Runs of neighbouring rows with about `num_tokens` each."""
    chunk: list[Row] = []
    filled = given = 0
    for row in rows:
        if given == most:
            return
        chunk.append(row)
        filled += row.num_tokens
        if filled >= num_tokens:
            yield chunk
            chunk, filled, given = [], 0, given + 1
    if chunk and given < most:
        yield chunk


def _pieces(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    return (list(rows[start : start + size]) for start in range(0, len(rows), size))


def _altered(rows: Sequence[Row], copy: int) -> list[Row]:
    """The same rows with texts that no other copy has."""
    return [Row(doc_id=f"{copy}:{r.doc_id}", text=f"{copy}. {r.text}", num_tokens=r.num_tokens) for r in rows]


def _write(folder: Path, parts: Iterator[list[Row]] | Sequence[list[Row]]) -> Path:
    """One file a part, named in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(parts):
        columns = {"doc_id": [r.doc_id for r in rows], "text": [r.text for r in rows]}
        pq.write_table(pa.table(columns), folder / f"{number:04d}.parquet")
    return folder
