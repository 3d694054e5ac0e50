"""Artifacts are best effort: whatever the server does, the data goes on."""

from __future__ import annotations

import threading
import time

import pytest

from tasks import artifacts


@pytest.fixture(autouse=True)
def closed_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_breaker", artifacts._Breaker())


def test_a_call_that_works_gives_its_value() -> None:
    assert artifacts.best_effort(lambda: 7) == 7


def test_a_call_that_raises_gives_none_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> int:
        raise ConnectionError("no server")

    assert artifacts.best_effort(broken) is None
    assert "artifact not written (ConnectionError: no server)" in caplog.text


def test_a_call_that_hangs_is_left_behind_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "TIME_LIMIT_S", 0.05)
    release = threading.Event()
    start = time.monotonic()
    assert artifacts.best_effort(lambda: release.wait(30)) is None
    assert time.monotonic() - start < 5
    release.set()


def test_after_a_failure_no_call_is_tried_for_a_while() -> None:
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise ConnectionError

    for _ in range(5):
        artifacts.best_effort(broken)
    assert len(calls) == 1


def test_the_pause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "PAUSE_S", 0.0)
    artifacts.best_effort(lambda: 1 / 0)
    assert artifacts.best_effort(lambda: 7) == 7


def test_tables_are_capped_and_hold_no_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(
        artifacts, "create_table_artifact", lambda table, **rest: seen.update(table=table, **rest)
    )
    artifacts.log_throughput([{"tokens_per_second": float("inf"), "rows": 3}] * 300, "many")
    assert seen["key"] == "token-throughput"
    assert seen["table"] == [{"tokens_per_second": 0.0, "rows": 3}] * artifacts.MAX_TABLE_ROWS


def test_progress_is_updated_seldom_but_always_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    monkeypatch.setattr(artifacts, "create_progress_artifact", lambda *_, **__: "the-id")
    monkeypatch.setattr(artifacts, "update_progress_artifact", lambda _, share: shown.append(share))
    progress = artifacts.ProgressArtifact("job", every_s=3600)
    for done in range(1, 101):
        progress.update(done / 100)
    assert shown == [1.0, 100.0]
