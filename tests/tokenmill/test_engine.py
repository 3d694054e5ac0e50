"""A whole job by the engine alone: without Prefect, and without a trace where the job is wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from outputs import MINILM, jsonl, published, run_fake, tree, write_files

from tokenmill.engine import run_job
from tokenmill.errors import (
    BackendUnavailableError,
    ConfigError,
    InputNotFoundError,
    OutputError,
    TokenmillError,
    UnreadableFileError,
)
from tokenmill.testing import FakeBackend, make_job

WITHOUT_PREFECT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"prefect", "great_expectations", "flows", "tasks", "blocks"}:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Blocker())
import pkgutil
import importlib
import tokenmill

for module in pkgutil.walk_packages(tokenmill.__path__, "tokenmill."):
    if module.name != "tokenmill.gates":
        importlib.import_module(module.name)

from pathlib import Path
from tokenmill.engine import finish
from tokenmill.store import Store
from tokenmill.testing import FakeBackend, make_job, make_run
from tokenmill.verify import verify

folder = Path(sys.argv[1])
manifest = finish(make_run(make_job(folder)), FakeBackend())
assert manifest.counts.rows_out == 3, manifest.counts
assert verify(Store.open(str(folder / "out"))).problems == ()
assert not {"prefect", "great_expectations"} & set(sys.modules)
print("done without prefect")
"""


def test_the_engine_runs_where_prefect_cannot_be_imported(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["x", "y", "z"])})
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WITHOUT_PREFECT))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done without prefect"


def test_importing_the_engine_loads_no_torch() -> None:
    code = (
        "import sys, tokenmill.engine, tokenmill.verify; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


def parquet(**columns) -> pa.Table:
    return pa.table(columns)


BAD_JOBS = {
    "no input": ({}, {"input": {"uri": "missing"}}, InputNotFoundError),
    "empty folder": ({"_x": ""}, {}, InputNotFoundError),
    "wrong column in Parquet": ({"a.parquet": parquet(body=["x"])}, {}, InputNotFoundError),
    "wrong column in a second CSV": ({"a.csv": "text\nx\n", "b.csv": "body\nx\n"}, {}, InputNotFoundError),
    "wrong column in JSONL": ({"a.jsonl": jsonl([{"body": 1}])}, {}, InputNotFoundError),
    "wrong id": ({"a.jsonl": jsonl(["x"])}, {"input": {"id": "doc"}}, InputNotFoundError),
    "wrong type": ({"a.parquet": parquet(text=[1])}, {}, ConfigError),
    "columns of plain text": ({"a.txt": "x"}, {"input": {"keep": ["k"]}}, ConfigError),
    "kept types that differ": (
        {"a.parquet": parquet(text=["x"], k=[1]), "b.parquet": parquet(text=["x"], k=["1"])},
        {"input": {"keep": ["k"]}},
        ConfigError,
    ),
    "kept types of CSV and Parquet": (
        {"a.parquet": parquet(text=["x"], k=[1]), "b.csv": "text,k\nx,1\n"},
        {"input": {"keep": ["k"]}},
        ConfigError,
    ),
    "truncated Parquet": ({"a.parquet": b"PAR1xxxx"}, {}, UnreadableFileError),
    "damaged gzip": ({"a.jsonl.gz": b"not gzip"}, {}, UnreadableFileError),
    "unreadable header": ({"a.csv": 'a,"text\n'}, {}, UnreadableFileError),
}


@pytest.mark.parametrize(("files", "sections", "error"), BAD_JOBS.values(), ids=BAD_JOBS.keys())
def test_a_bad_job_fails_before_any_work_and_leaves_nothing(
    tmp_path: Path, files: dict, sections: dict, error: type[TokenmillError]
) -> None:
    write_files(tmp_path, files)
    if sections.get("input", {}).get("uri") == "missing":
        sections = {"input": {"uri": str(tmp_path / "missing")}}
    backend = FakeBackend(failures=10**6)
    with pytest.raises(error) as caught:
        run_fake(make_job(tmp_path, **sections), backend)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert backend.failures == 10**6
    assert not (tmp_path / "out").exists()


def test_types_that_differ_are_named_with_both_files(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"a.parquet": parquet(text=["x"], k=[1]), "b.parquet": parquet(text=["x"], k=["1"])}
    )
    message = r"input\.keep: column 'k' is int64 in .*a\.parquet but string in .*b\.parquet"
    with pytest.raises(ConfigError, match=message):
        run_fake(make_job(tmp_path, input={"keep": ["k"]}))


def test_an_output_that_cannot_be_written_is_a_mistake_in_the_job(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["x"])})
    (tmp_path / "file").write_text("x")
    for uri in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(OutputError, match=r"output\.uri"):
            run_fake(make_job(tmp_path, output={"uri": str(uri)}))
    assert (tmp_path / "file").read_text() == "x"


def test_a_failing_shard_keeps_the_finished_ones_and_a_second_run_does_the_rest(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{n}.jsonl": jsonl([f"text {n}"]) for n in range(4)})
    job = make_job(tmp_path, input={"shard_bytes": 1}, run={"workers": 2})
    with pytest.raises(BackendUnavailableError):
        run_fake(job, FakeBackend(failures=1))
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = run_fake(job)
    assert manifest.counts.rows_out == 4
    assert [row["row_ordinal"] for row in published(job)] == [0] * 4


def test_an_empty_corpus_is_a_published_dataset_without_rows(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "a.csv": "text,k\n",
            "b.jsonl": "",
            "c.parquet": parquet(text=pa.array([], pa.string()), k=pa.array([], pa.string())),
        },
    )
    job = make_job(tmp_path, input={"keep": ["k"]}, aggregate={"group_by": ["k"]})
    manifest = run_fake(job)
    assert (manifest.counts.rows_in, manifest.counts.reject_rate) == (0, 0.0)
    assert published(job) == published(job, "groups") == []
    run_fake(job, FakeBackend(failures=1))


def test_a_user_id_may_repeat_and_files_may_share_a_name(tmp_path: Path) -> None:
    rows = [{"text": "x", "id": "same"}] * 2
    write_files(tmp_path, {"one/a.jsonl": jsonl(rows), "two/a.jsonl": jsonl(rows)})
    job = make_job(tmp_path, input={"id": "id"})
    run_fake(job)
    places = [(row["source_file"], row["row_ordinal"], row["id"]) for row in published(job)]
    assert len(set(places)) == 4
    assert {row_id for _, _, row_id in places} == {"same"}


def test_a_job_by_name_of_model_and_in_one_call(tmp_path: Path, minilm_backend) -> None:
    write_files(tmp_path, {"a.txt": "hello world\n"})
    job = make_job(tmp_path, inference={"model": MINILM})
    manifest = run_job(job, model=minilm_backend)
    assert manifest.counts.rows_out == 1
    (row,) = published(job)
    assert len(row["embedding"]) == 384
    before = tree(tmp_path / "out")
    assert run_job(job, model=minilm_backend) == manifest
    assert tree(tmp_path / "out") == before
