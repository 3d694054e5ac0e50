"""Which Prefect server a command uses: the one PREFECT_API_URL names, else a temporary one.

The temporary server is started once for a command and ended by it; its database stays in
PREFECT_HOME, so that its runs can be looked at later with `prefect server start`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.errors import TokenmillError

START_TIMEOUT_S = 180

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_CLI_COLORS": "false",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def quiet_environment(verbose: bool) -> None:
    """Defaults for this process, before prefect is imported: no telemetry, no log on the console."""
    for name, value in QUIET.items():
        if not (verbose and name.startswith("PREFECT_LOGGING")):
            os.environ.setdefault(name, value)


@contextmanager
def prefect_server() -> Iterator[float | None]:
    """A server for the block; gives the seconds its start took, or None if one was there already.

    Raises TokenmillError if it does not come up.
    """
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        yield None
        return
    start = time.perf_counter()
    server = SubprocessASGIServer()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        _start(server)
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            try:
                yield time.perf_counter() - start
            finally:
                _drain()
    finally:
        server.stop()


def _start(server: Any) -> None:
    """Subtle: Prefect itself waits 20 s, too short for the first start on a busy machine."""
    try:
        server.start(timeout=START_TIMEOUT_S)
    except RuntimeError as exc:
        raise TokenmillError(
            f"Prefect's temporary server does not answer within {START_TIMEOUT_S} s; run again on a quieter "
            "machine, or start one with `prefect server start` and name it in PREFECT_API_URL"
        ) from exc


def has_server() -> bool:
    """Whether the environment or the profile names a server."""
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


def _drain() -> None:
    """Send what is queued for the server before it ends, so that nothing complains afterwards."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=5)
    EventsWorker.drain_all(timeout=10)
