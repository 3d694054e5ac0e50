"""prefect.yaml, the job beside it and the scripts around it fit the flows, without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments import deploy, job
from tokenmill.job import Job

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deployments" / "example-job.yaml"
DEPLOYMENTS = deploy.deployments()
ENTRYPOINTS = sorted({deployment["entrypoint"] for deployment in DEPLOYMENTS})

LOAD_ALL = """
import sys
from prefect.flows import load_flow_from_entrypoint
print([load_flow_from_entrypoint(name).name for name in sys.argv[1:]])
"""


def test_every_flow_has_a_deployment_on_the_cpu_pool_and_those_with_a_model_one_on_the_gpu_pool() -> None:
    found = {(d["entrypoint"].rpartition(".")[2], d["name"], d["work_pool"]["name"]) for d in DEPLOYMENTS}
    flows = ["token_pipeline", "tokenize_corpus", "run_inference", "aggregate_results"]
    expected = {(flow, "cpu", "tokenmill-cpu") for flow in flows}
    expected |= {(flow, "gpu", "tokenmill-gpu") for flow in ("token_pipeline", "run_inference")}
    assert found == expected


@pytest.mark.parametrize("where", ["foreign", "root"])
def test_every_entrypoint_loads_from_any_folder(where: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *ENTRYPOINTS],
        cwd=tmp_path if where == "foreign" else ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = sorted(name.rpartition(".")[2].replace("_", "-") for name in ENTRYPOINTS)
    assert (done.returncode, done.stdout) == (0, f"{names}\n"), done.stderr


def test_the_nightly_schedule_has_a_time_zone_and_a_valid_job_and_is_off() -> None:
    [nightly] = [schedule for d in DEPLOYMENTS for schedule in d["schedules"]]
    assert (nightly["cron"], nightly["timezone"], nightly["active"]) == ("0 2 * * *", "Etc/UTC", False)
    assert Job.parse(nightly["parameters"]["job"]).input.storage.block == "YOUR-STORAGE-BLOCK"


def test_a_job_file_becomes_the_parameter_with_only_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main([str(EXAMPLE)]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(EXAMPLE.read_text())


def test_a_bad_job_file_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: x\ninput: {uri: y}\noutput: {url: z, uri: z}\n")
    assert job.main([str(file)]) == 2
    assert "unknown key 'output.url'; did you mean 'uri'?" in capsys.readouterr().err
    assert job.main([]) == 2
    assert capsys.readouterr().err == "usage: python -m deployments.job JOB\n"


def test_without_a_server_deploy_tells_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_settings({PREFECT_API_URL: None}):
        assert deploy.main() == 2
    commands = [line for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    assert [command.split()[-1] for command in commands] == [
        "--background",
        "PREFECT_API_URL=http://127.0.0.1:4200/api",
        "deploy",
    ]


def test_a_server_that_is_away_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert deploy.main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: http://127.0.0.1:9/api does not answer")
