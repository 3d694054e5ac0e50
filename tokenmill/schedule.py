"""Order of work: tokenize ahead, infer each shard as soon as its tokens are there.

Knows neither Prefect nor threads: whoever calls says how a shard is submitted, and gets a future
back that can call when it is done. The engine and the flows share it.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tokenmill.plan import Shard
from tokenmill.receipts import Stage

F = TypeVar("F", bound="Doneable")


class Doneable(Protocol):
    """A future of concurrent.futures or of Prefect."""

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Generic[F]):
    """A shard's stage that ended, well or not; the future tells."""

    stage: Stage
    shard: Shard
    future: F


def pipelined(
    *,
    tokenize: Iterable[Shard],
    infer: Iterable[Shard],
    submit: Callable[[Stage, Shard], F],
    succeeded: Callable[[F], bool],
    tokenize_slots: int,
    infer_slots: int,
    before_infer: Callable[[], None] | None = None,
) -> Iterator[Finished[F]]:
    """Run both stages over the shards, giving each stage of each shard as it ends.

    A shard in both lists is inferred only after its tokenizing succeeded.  The slots bound how
    many shards of a stage are in progress at once.
    before_infer: called once, when nothing is left to tokenize; no shard is inferred before, and none at
    all if it raises.
    """
    waiting: dict[Stage, deque[Shard]] = {"tokenize": deque(tokenize), "infer": deque()}
    tokenizing = {shard.index for shard in waiting["tokenize"]}
    wanted = {shard.index: shard for shard in infer}
    waiting["infer"].extend(s for s in wanted.values() if s.index not in tokenizing)
    free: dict[Stage, int] = {"tokenize": tokenize_slots, "infer": infer_slots}
    ended: queue.SimpleQueue[Finished[F]] = queue.SimpleQueue()
    running, untokenized = 0, len(tokenizing)
    while True:
        if before_infer is not None and not untokenized:
            before_infer()
            before_infer = None
        for stage in free:
            if stage == "infer" and before_infer is not None:
                continue
            while free[stage] and waiting[stage]:
                shard = waiting[stage].popleft()
                future = submit(stage, shard)
                free[stage] -= 1
                running += 1
                done = Finished(stage=stage, shard=shard, future=future)
                future.add_done_callback(_announcer(ended, done))
        if not running:
            return
        finished = ended.get()
        running -= 1
        untokenized -= finished.stage == "tokenize"
        free[finished.stage] += 1
        if finished.stage == "tokenize" and finished.shard.index in wanted and succeeded(finished.future):
            waiting["infer"].append(finished.shard)
        yield finished


def _announcer(ended: queue.SimpleQueue[Finished[F]], done: Finished[F]) -> Callable[[object], None]:
    return lambda _: ended.put(done)
