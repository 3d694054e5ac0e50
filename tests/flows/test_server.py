"""The temporary server: what is said, and left, when it does not come up."""

from __future__ import annotations

import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import server
from tokenmill.errors import TokenmillError


def test_a_server_that_does_not_come_up_is_one_clear_error_and_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    run = SubprocessASGIServer._run_uvicorn_command

    def noted(self: SubprocessASGIServer):
        started.append(run(self))
        return started[-1]

    monkeypatch.setattr(SubprocessASGIServer, "_run_uvicorn_command", noted)
    monkeypatch.setattr(server, "START_TIMEOUT_S", 0.1)
    with (
        temporary_settings({PREFECT_API_URL: None}),
        pytest.raises(TokenmillError, match=r"does not answer within 0\.1 s; .* PREFECT_API_URL"),
        server.prefect_server(),
    ):
        pass
    assert started[-1].wait(30) is not None
