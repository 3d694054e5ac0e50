"""Reading ahead and writing behind: order kept, errors delivered, nothing left running."""
# ruff: noqa: PT012 (what happens when a block fails is the subject)

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.overlap import Stopwatch, reading_ahead, writing_behind


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tokenmill-")]


@given(st.lists(st.one_of(st.none(), st.integers()), max_size=20))
def test_the_same_items_in_the_same_order(items: list[int | None]) -> None:
    with reading_ahead(items) as ahead:
        assert list(ahead) == items
    assert workers() == []


def test_at_most_two_items_wait() -> None:
    made: list[int] = []

    def produce() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    with reading_ahead(produce()) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 5
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(made) == 3
    assert workers() == []


def test_an_error_of_the_source_arrives_after_what_came_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("source")

    with reading_ahead(failing()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(ZeroDivisionError, match="source"):
            next(ahead)
    assert workers() == []


def test_a_consumer_that_stops_early_leaves_nothing_running() -> None:
    with pytest.raises(KeyError), reading_ahead(iter(range(10**9))) as ahead:
        next(ahead)
        raise KeyError
    assert workers() == []


def test_writes_happen_in_order_on_another_thread() -> None:
    done: list[tuple[int, str]] = []
    with writing_behind() as write:
        for number in range(20):
            write(lambda number=number: done.append((number, threading.current_thread().name)))
    assert [number for number, _ in done] == list(range(20))
    assert {name.split("_")[0] for _, name in done} == {"tokenmill-writer"}
    assert workers() == []


def test_an_error_of_a_write_arrives_at_the_next_write_or_at_the_end() -> None:
    def fail() -> None:
        raise ZeroDivisionError("write")

    done: list[int] = []
    with pytest.raises(ZeroDivisionError, match="write"), writing_behind() as write:
        write(fail)
        write(lambda: done.append(1))
    assert done == []
    with pytest.raises(ZeroDivisionError, match="write"), writing_behind() as write:
        write(fail)
    assert workers() == []


def test_an_error_of_the_writing_thread_itself_is_not_hidden_by_one_of_a_write() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(KeyError), writing_behind() as write:
        write(fail)
        raise KeyError
    assert workers() == []


def test_a_stopwatch_adds_up_even_if_the_block_fails() -> None:
    watch = Stopwatch()
    with watch.timing("a"):
        time.sleep(0.01)
    with pytest.raises(KeyError), watch.timing("a"):
        time.sleep(0.01)
        raise KeyError
    assert watch.seconds["a"] >= 0.02
    assert set(watch.seconds) == {"a"}
