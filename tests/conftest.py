"""No test touches a Prefect server or profile of the person who runs it; some share one of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before prefect is imported, which reads them once.
for name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[name]
PREFECT_HOME = Path(tempfile.mkdtemp(prefix="tokenmill-tests-prefect-"))
os.environ["PREFECT_HOME"] = str(PREFECT_HOME)
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"


def pytest_unconfigure() -> None:
    shutil.rmtree(PREFECT_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """One temporary Prefect server for the tests that ask for it; its API's URL."""
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    # Subtle: each heartbeat thread costs a second at the end of its flow.
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({"flows.heartbeat_frequency": None}),
    ):
        yield str(PREFECT_API_URL.value())
