"""Contenders in turn on the same chunks, each in its own process; only one computes at a time.

Taking turns chunk by chunk, with another one first each time, spreads what a machine does over
time (clocks, neighbours) evenly over all. A ratio is taken within a chunk; the median is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.child import Child, save_job, started
from benchmarks.contenders import CONTENDERS
from tokenmill.accounting import Counts
from tokenmill.engine import Run
from tokenmill.job import Job
from tokenmill.receipts import read_receipts

OURS = "tokenmill"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """Seconds by contender and chunk. All contenders had the same rows.

    tokens, rows: of each chunk.  tokenize_s: what our first stage took for it, apart.
    min_cosine: of all vectors of a contender with ours.  whole_*: our embed stage over everything.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    tokenize_s: tuple[float, ...]
    seconds: Mapping[str, tuple[float, ...]]
    min_cosine: Mapping[str, float]
    whole_tokens: int
    whole_rows: int
    whole_s: float
    whole_effective_token_ratio: float
    threads: int
    cuda: bool

    def rate(self, name: str) -> float:
        """Median of a contender's tokens per second over the chunks."""
        return median(n / s for n, s in zip(self.tokens, self.seconds[name], strict=True))

    def ratios(self, peer: str) -> list[float]:
        """How many times faster ours is than a peer, chunk by chunk."""
        return [b / a for a, b in zip(self.seconds[OURS], self.seconds[peer], strict=True)]

    def ratios_with_tokenizing(self, peer: str) -> list[float]:
        """The same, our tokenize stage included: peers that start from text tokenize as they go."""
        ours = [a + b for a, b in zip(self.seconds[OURS], self.tokenize_s, strict=True)]
        return [b / a for a, b in zip(ours, self.seconds[peer], strict=True)]

    @property
    def whole_rate(self) -> float:
        return self.whole_tokens / self.whole_s


def measure(job: Job, num_chunks: int, folder: Path) -> SideBySide:
    """Tokenize the corpus, let contenders take turns on its chunks, then run ours over all of it."""
    run = Run.open(job)
    plan = run.plan()
    run.claim(plan)
    receipts = [run.tokenize(shard) for shard in plan.shards]
    chunks = range(num_chunks)
    job_file = save_job(job, folder / "side-by-side.json")
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(
                started(folder / f"{name}.log", "benchmarks.child", name, job_file, str(folder))
            )
            for name in CONTENDERS
        }
        ready = [child.ready for child in children.values()]
        seconds = _take_turns(children, chunks)
        whole = [*seconds[OURS], *_rest(children[OURS], range(num_chunks, len(plan.shards)))]
    inferred = Counts.total(r.counts for r in read_receipts(run.store, "infer", plan.keys_of("infer")))
    return SideBySide(
        tokens=tuple(receipts[number].counts.tokens for number in chunks),
        rows=tuple(receipts[number].counts.rows_out for number in chunks),
        tokenize_s=tuple(receipts[number].seconds["wall"] for number in chunks),
        seconds={name: tuple(values) for name, values in seconds.items()},
        min_cosine={name: _min_cosine(name, chunks, folder) for name in CONTENDERS if name != OURS},
        whole_tokens=sum(receipt.counts.tokens for receipt in receipts),
        whole_rows=sum(receipt.counts.rows_out for receipt in receipts),
        whole_s=sum(whole),
        whole_effective_token_ratio=inferred.effective_token_ratio,
        threads=_only(r["threads"] for r in ready),
        cuda=_only(r["cuda"] for r in ready),
    )


def _only(values: Any) -> Any:
    """The one value that all children agree on."""
    (value,) = set(values)
    return value


def _take_turns(children: Mapping[str, Child], chunks: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each contender for each chunk; the one that begins changes with each chunk."""
    names = list(children)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn, chunk in enumerate(chunks):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            seconds[name].append(children[name].ask(str(chunk))["seconds"])
            print(f"  chunk {chunk}  {name:<24} {seconds[name][-1]:7.2f} s", flush=True)
    return seconds


def _rest(child: Child, shards: Sequence[int]) -> list[float]:
    return [child.ask(str(shard))["seconds"] for shard in shards]


def _min_cosine(name: str, chunks: Sequence[int], folder: Path) -> float:
    """Smallest cosine of a row's vector with ours, over all chunks."""
    smallest = []
    for chunk in chunks:
        ours_ND, theirs_ND = (
            np.load(folder / f"{who}-{chunk}.npy").astype(np.float64) for who in (OURS, name)
        )
        assert ours_ND.shape == theirs_ND.shape, f"{name}: {theirs_ND.shape}, ours {ours_ND.shape}"
        lengths_N = np.linalg.norm(ours_ND, axis=1) * np.linalg.norm(theirs_ND, axis=1)
        smallest.append(float(((ours_ND * theirs_ND).sum(axis=1) / lengths_N).min()))
    return min(smallest)
