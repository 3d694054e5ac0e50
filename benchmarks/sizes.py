"""How much is measured: the full benchmark, and a smoke run that shows that it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Tokens are real tokens, after truncation.

    corpus_tokens: goes through our embed stage once, whole.
    chunk_tokens, num_chunks: the first rows of the corpus, on which contenders take turns.
    job_tokens, job_repeats: the job that runs both under Prefect and without.
    memory_tokens: one times the corpus of the memory measurement; the other has four times as many.
    """

    corpus_tokens: int
    chunk_tokens: int
    num_chunks: int
    job_tokens: int
    job_repeats: int
    memory_tokens: int


FULL = Sizes(
    corpus_tokens=1_000_000,
    chunk_tokens=60_000,
    num_chunks=3,
    job_tokens=150_000,
    job_repeats=2,
    memory_tokens=120_000,
)
SMOKE = Sizes(
    corpus_tokens=30_000,
    chunk_tokens=6_000,
    num_chunks=1,
    job_tokens=6_000,
    job_repeats=1,
    memory_tokens=4_000,
)
