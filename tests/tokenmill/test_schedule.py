"""Order of work: a shard is inferred only after its tokens are there, and never too many at once."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.plan import Shard
from tokenmill.schedule import pipelined

indices = st.sets(st.integers(0, 12))


def shards(numbers: set[int]) -> list[Shard]:
    return [Shard(index=n, slices=(), tokens_key=f"t{n}", results_key=f"r{n}") for n in sorted(numbers)]


@given(indices, indices, indices, st.integers(1, 4), st.integers(1, 2))
def test_every_shard_goes_through_in_order_and_within_the_slots(
    tokenize: set[int], infer: set[int], failing: set[int], tokenize_slots: int, infer_slots: int
) -> None:
    lock = threading.Lock()
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    done: list[tuple[str, int]] = []
    early: list[int] = []

    def work(stage: str, index: int) -> None:
        with lock:
            running[stage] += 1
            most[stage] = max(most[stage], running[stage])
            if stage == "infer" and index in tokenize and ("tokenize", index) not in done:
                early.append(index)
        try:
            if stage == "tokenize" and index in failing:
                raise ValueError(index)
        finally:
            with lock:
                done.append((stage, index))
                running[stage] -= 1

    with ThreadPoolExecutor(8) as pool:

        def submit(stage: str, shard: Shard) -> Future[None]:
            return pool.submit(work, stage, shard.index)

        ended = [
            (finished.stage, finished.shard.index)
            for finished in pipelined(
                tokenize=shards(tokenize),
                infer=shards(infer),
                submit=submit,
                succeeded=lambda future: future.exception() is None,
                tokenize_slots=tokenize_slots,
                infer_slots=infer_slots,
            )
        ]
    expected = {("tokenize", n) for n in tokenize} | {("infer", n) for n in infer - (tokenize & failing)}
    assert sorted(ended) == sorted(expected)
    assert early == []
    assert most["tokenize"] <= tokenize_slots
    assert most["infer"] <= infer_slots


def test_a_shard_is_inferred_while_others_are_still_tokenized() -> None:
    inferring = threading.Event()

    def work(stage: str, index: int) -> None:
        if (stage, index) == ("tokenize", 1) and not inferring.wait(30):
            raise TimeoutError("shard 0 waited for shard 1")
        if stage == "infer":
            inferring.set()

    with ThreadPoolExecutor(4) as pool:
        both = shards({0, 1})
        ended = list(
            pipelined(
                tokenize=both,
                infer=both,
                submit=lambda stage, shard: pool.submit(work, stage, shard.index),
                succeeded=lambda future: future.exception() is None,
                tokenize_slots=2,
                infer_slots=1,
            )
        )
    assert len(ended) == 4
    assert all(finished.future.exception() is None for finished in ended)
