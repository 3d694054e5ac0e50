"""The temporary server: what is said, and left, when it does not come up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: Prefect has one temporary server a process, and the tests share it.
SCRIPT = """
from prefect.server.api.server import SubprocessASGIServer
from flows import server
from tokenmill.errors import TokenmillError

started, run = [], SubprocessASGIServer._run_uvicorn_command
SubprocessASGIServer._run_uvicorn_command = lambda self: started.append(run(self)) or started[-1]
server.START_TIMEOUT_S = 0.1
try:
    with server.prefect_server():
        raise SystemExit("it came up")
except TokenmillError as exc:
    print(exc)
started[-1].wait(60)
"""


def test_a_server_that_does_not_come_up_is_one_clear_error_and_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Prefect's temporary server does not answer within 0.1 s;")
    assert "PREFECT_API_URL" in done.stdout
