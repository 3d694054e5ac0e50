"""Verification from the output alone: everything that is missing, changed, miscounted or stray is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outputs import jsonl, run_fake, tree, write_files

from tokenmill.errors import ConfigError, DataError
from tokenmill.store import Store
from tokenmill.testing import FakeBackend, make_job, make_run
from tokenmill.verify import Verdict, verify


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A published output with two shards, rejects and groups."""
    rows = [{"text": f"text {n}", "k": str(n % 2)} for n in range(5)]
    write_files(tmp_path, {"a.jsonl": jsonl(rows) + "{\n", "b.jsonl": jsonl(rows)})
    job = make_job(
        tmp_path,
        input={"keep": ["k"], "shard_bytes": 1},
        aggregate={"group_by": ["k"]},
        quality={"max_reject_rate": 1},
    )
    run_fake(job)
    return tmp_path / "out"


def check(out: Path) -> Verdict:
    return verify(Store.open(str(out)))


def edit(path: Path, place: list, value: object) -> None:
    data = json.loads(path.read_text())
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(data))


def test_a_sound_output_has_no_problems(out: Path) -> None:
    verdict = check(out)
    assert verdict.problems == ()
    assert (verdict.job, verdict.num_shards, verdict.num_done, verdict.published) == ("test-job", 2, 2, True)
    data = [name for name in tree(out) if name.endswith(".parquet")]
    assert verdict.files_checked == len(data)
    assert verdict.bytes_checked == sum((out / name).stat().st_size for name in data)


def test_verifying_changes_nothing(out: Path) -> None:
    before = tree(out)
    check(out)
    assert tree(out) == before


@pytest.mark.parametrize("folder", ["tokens", "parts", "results", "rejects", "groups"])
def test_a_missing_file_is_named(out: Path, folder: str) -> None:
    path = next(iter((out / folder).iterdir()))
    path.unlink()
    assert check(out).problems == (f"{folder}/{path.name}: missing",)


@pytest.mark.parametrize("folder", ["tokens", "parts", "results", "rejects", "groups"])
def test_a_flipped_byte_is_named(out: Path, folder: str) -> None:
    path = next(iter((out / folder).iterdir()))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # results may share their bytes with a part
    path.write_bytes(content)
    expected = f"{folder}/{path.name}: checksum differs: its bytes changed after it was written"
    assert check(out).problems == (expected,)


def test_a_file_cut_short_is_named_with_both_sizes(out: Path) -> None:
    path = next(iter((out / "tokens").iterdir()))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-7])
    assert check(out).problems == (f"tokens/{path.name}: {size - 7} bytes, {size} written",)


@pytest.mark.parametrize(
    "name", ["results/x.parquet", "tokens/x", "receipts/infer-0.json", "rejects/y.parquet"]
)
def test_a_stray_file_is_named(out: Path, name: str) -> None:
    (out / name).write_bytes(b"x")
    assert check(out).problems == (f"{name}: nothing names it",)


def test_files_that_are_not_ours_are_nobodys_business(out: Path) -> None:
    (out / "notes.txt").write_text("x")
    (out / "report").mkdir(exist_ok=True)
    (out / "report" / "x.html").write_text("x")
    assert check(out).problems == ()


def test_a_wrong_row_count_is_named(out: Path) -> None:
    edit(out / "manifest.json", ["results", 0, "rows"], 11)
    (name,) = [f["path"] for f in json.loads((out / "manifest.json").read_text())["results"]]
    assert check(out).problems == (
        f"{name}: 10 rows, 11 written",
        "manifest.json: rows out = rows of results: 10 != 11",
    )


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (["counts", "rows_in"], 12, "rows in = rows out + rejects: 12 != 11"),
        (["counts", "rows_out"], 9, "rows in = rows out + rejects: 11 != 10"),
        (["counts", "tokens"], 1, "its counts differ from the sum of the receipts"),
        (["shards", 0, "rows_in"], 9, "rows in = sum over shards: 11 != 14"),
    ],
)
def test_sums_of_the_manifest_that_are_off_are_named(
    out: Path, place: list, value: int, problem: str
) -> None:
    edit(out / "manifest.json", place, value)
    assert f"manifest.json: {problem}" in check(out).problems


@pytest.mark.parametrize(
    ("stage", "place", "value", "problem"),
    [
        ("tokenize", ["counts", "rows_in"], 77, "rows in = rows out + rejects"),
        ("infer", ["counts", "rows_out"], 77, "rows out = rows of its part: 77 != 5"),
        ("tokenize", ["counts", "rejects"], {"bad_json": 3}, "rejects = rows of its rejects: 3 !="),
    ],
)
def test_sums_of_a_receipt_that_are_off_are_named(
    out: Path, stage: str, place: list, value: object, problem: str
) -> None:
    path = sorted((out / "receipts").glob(f"{stage}-*.json"))[0]
    edit(path, place, value)
    assert any(p.startswith(f"receipts/{path.name}: {problem}") for p in check(out).problems)


def test_a_receipt_or_manifest_that_cannot_be_read_is_named_and_the_rest_is_checked(out: Path) -> None:
    receipt = sorted((out / "receipts").glob("infer-*.json"))[0]
    receipt.write_text("{")
    stray = out / "results" / "x.parquet"
    stray.write_bytes(b"")
    problems = check(out).problems
    assert any(f"{receipt.name}: not a receipt that this version reads" in problem for problem in problems)
    assert "results/x.parquet: nothing names it" in problems
    (out / "manifest.json").write_text("{")
    verdict = check(out)
    assert any("manifest.json: not readable as JSON" in problem for problem in verdict.problems)
    assert verdict.published is True


def test_an_unfinished_output_is_sound_as_far_as_it_goes(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["x"]), "b.jsonl": jsonl(["y"])})
    run = make_run(make_job(tmp_path, input={"shard_bytes": 1}))
    plan = run.plan()
    run.claim(plan)
    run.tokenize(plan.shards[0])
    run.infer(plan.shards[0], FakeBackend())
    run.tokenize(plan.shards[1])
    verdict = check(tmp_path / "out")
    assert (verdict.problems, verdict.num_done, verdict.num_shards, verdict.published) == ((), 1, 2, False)
    assert verdict.files_checked == 3


def test_what_is_no_output_is_a_mistake_in_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no job\.json here; not an output of tokenmill"):
        check(tmp_path)
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(DataError, match=r"job\.json: not readable as JSON"):
        check(tmp_path)
