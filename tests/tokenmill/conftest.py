"""Settings and expensive things that the engine's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import pytest
from ceph_gateway import GatewayUnavailableError, ceph_gateway
from hypothesis import HealthCheck, settings
from outputs import MINILM

from tokenmill.backend import Backend
from tokenmill.settle import Setup, prepare
from tokenmill.testing import make_job

# Derandomized: the same examples in every run, so that no test fails by luck.
settings.register_profile(
    "laws",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("laws")


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """No test cuts the power; waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A job with the real MiniLM, settled."""
    folder = tmp_path_factory.mktemp("minilm")
    return prepare(make_job(folder, inference={"model": MINILM}))


@pytest.fixture(scope="session")
def minilm_backend(minilm: Setup) -> Backend:
    """The real model, loaded once for all tests."""
    return minilm.need_model().load_backend()


@pytest.fixture(scope="session")
def ceph() -> Iterator[str]:
    """The endpoint of Ceph's S3 gateway; tests that ask for it are skipped where it cannot be had."""
    with ExitStack() as stack:
        try:
            endpoint = stack.enter_context(ceph_gateway())
        except GatewayUnavailableError as exc:
            pytest.skip(f"no Ceph gateway: {exc}")
        yield endpoint
