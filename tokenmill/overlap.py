"""Doing two things at once: read ahead and write behind, each by one thread with one slot.

Errors of the other thread arrive in this one; nothing is left running when a block ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Seconds spent in named activities of one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def reading_ahead(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """The same items, the next one prepared by a thread while this one is used.

    At most two items exist at a time beside the one in use.
    """
    slot: queue.Queue[Callable[[], T] | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def offer(item: Callable[[], T] | None) -> bool:
        while not stopped.is_set():
            try:
                slot.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def fill() -> None:
        try:
            for item in items:
                if not offer(lambda item=item: item):  # type: ignore[misc]
                    return
        except BaseException as exc:  # noqa: BLE001 - raised again in the consuming thread
            error = exc
            offer(lambda: _raise(error))
        offer(None)

    def drain() -> Iterator[T]:
        while (item := slot.get()) is not None:
            yield item()

    thread = threading.Thread(target=fill, name="tokenmill-reader", daemon=True)
    thread.start()
    try:
        yield drain()
    finally:
        stopped.set()
        thread.join()


def _raise(exc: BaseException) -> T:  # type: ignore[type-var]
    raise exc


@contextmanager
def writing_behind() -> Iterator[Callable[[Callable[[], None]], None]]:
    """A function that runs jobs in order on another thread, at most one ahead of this one."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenmill-writer") as pool:
        running: list[Future[None]] = []

        def submit(work: Callable[[], None]) -> None:
            while running:
                running.pop().result()
            running.append(pool.submit(work))

        yield submit
        while running:
            running.pop().result()
