"""Publication: sums checked, limits kept, small parts made into large files, nothing else left."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from outputs import jsonl, published, published_bytes, run_fake, tree, write_files

from tokenmill.errors import AccountingError, ConfigError, DataError, OutputError, RejectLimitError
from tokenmill.job import Job
from tokenmill.testing import FakeBackend, make_job, make_run


@pytest.fixture
def job(tmp_path: Path) -> Job:
    write_files(tmp_path, {f"{n}.jsonl": jsonl([f"text {n}"] * 4) for n in range(6)})
    return make_job(tmp_path, input={"shard_bytes": 1})


def changed(job: Job, **sections) -> Job:
    data = job.model_dump(mode="json")
    for name, section in sections.items():
        data[name] = {**data[name], **section}
    return Job.parse(data)


def out(job: Job) -> Path:
    return Path(job.output.uri)


def test_small_parts_become_one_file(job: Job) -> None:
    manifest = run_fake(job)
    assert [file.rows for file in manifest.results] == [24]
    assert len(manifest.tokens) == len(manifest.shards) == 6


def test_published_files_have_about_the_size_that_was_asked_for(job: Job) -> None:
    manifest = run_fake(changed(job, output={"target_part_bytes": 1}))
    assert [file.rows for file in manifest.results] == [4] * 6
    assert run_fake(changed(job, output={"target_part_bytes": 10**9})).results[0].rows == 24
    assert len(list((out(job) / "results").iterdir())) == 1


def test_published_results_are_one_dataset_to_any_reader(job: Job) -> None:
    run_fake(changed(job, output={"target_part_bytes": 8000}))
    table = pq.read_table(out(job) / "results")
    assert table.num_rows == 24
    assert table.column_names == [
        "source_file",
        "row_ordinal",
        "id",
        "num_tokens",
        "num_tokens_dropped",
        "embedding",
    ]


def test_too_many_rejects_stop_before_the_model_and_a_raised_limit_tokenizes_nothing_again(
    job: Job, tmp_path: Path
) -> None:
    write_files(tmp_path, {"bad.jsonl": "{\n{\n"})
    with pytest.raises(RejectLimitError, match=r"2 of 26 rows rejected \(7\.69%: bad_json 2\)") as caught:
        run_fake(job, FakeBackend(failures=10**6))
    assert caught.value.exit_code == 3
    assert [p.name for p in out(job).iterdir() if p.name in ("manifest.json", "results", "parts")] == []
    before = {p: p.stat().st_mtime_ns for p in (out(job) / "tokens").iterdir()}
    manifest = run_fake(changed(job, quality={"max_reject_rate": 2 / 26}))
    assert {p: p.stat().st_mtime_ns for p in (out(job) / "tokens").iterdir()} == before
    assert manifest.counts.reject_rate == pytest.approx(2 / 26)


def test_too_many_rejects_keep_what_was_published_before(job: Job, tmp_path: Path) -> None:
    run_fake(job)
    before = published_bytes(job)
    write_files(tmp_path, {"bad.jsonl": "{\n{\n"})
    with pytest.raises(RejectLimitError):
        run_fake(job)
    assert published_bytes(job) == before


def test_an_unfinished_job_is_not_published(job: Job) -> None:
    run = make_run(job)
    plan = run.plan()
    run.claim(plan)
    for shard in plan.shards[:2]:
        run.tokenize(shard)
        run.infer(shard, FakeBackend())
    with pytest.raises(ConfigError, match="4 of 6 shards are unfinished; run the job first"):
        run.collect(plan)


def edit(path: Path, place: list[str], value: object) -> None:
    data = json.loads(path.read_text())
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(data))


def receipts(job: Job, stage: str) -> list[Path]:
    return sorted((out(job) / "receipts").glob(f"{stage}-*.json"))


@pytest.mark.parametrize(
    ("stage", "place", "value"),
    [
        ("tokenize", ["counts", "rows_in"], 5),
        ("tokenize", ["counts", "rows_out"], 3),
        ("infer", ["counts", "rows_in"], 3),
        ("infer", ["counts", "rejects"], {"non_finite": 1}),
    ],
)
def test_sums_that_are_off_are_never_shrugged_off(
    job: Job, stage: str, place: list[str], value: object
) -> None:
    run_fake(job)
    (out(job) / "manifest.json").unlink()
    edit(receipts(job, stage)[0], place, value)
    with pytest.raises(AccountingError):
        run_fake(job)
    assert not (out(job) / "manifest.json").exists()


def test_a_receipt_that_cannot_be_read_says_what_to_delete(job: Job) -> None:
    run_fake(job)
    (out(job) / "manifest.json").unlink()
    receipts(job, "infer")[0].write_text("{")
    with pytest.raises(DataError, match="not a receipt that this version reads; delete it to redo the shard"):
        run_fake(job)


@pytest.mark.parametrize("folder", ["parts", "tokens"])
def test_a_part_that_was_cut_short_is_not_published(job: Job, folder: str) -> None:
    run_fake(job)
    (out(job) / "manifest.json").unlink()
    path = sorted((out(job) / folder).iterdir())[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"bytes, \d+ were written; delete receipts/.* and run again"):
        run_fake(job)


def test_another_jobs_output_is_refused_and_untouched(job: Job, tmp_path: Path) -> None:
    run_fake(job)
    before = tree(out(job))
    with pytest.raises(
        OutputError, match=r"was written by job 'test-job', not 'other'; choose another folder"
    ):
        run_fake(Job.parse({**job.model_dump(mode="json"), "name": "other"}))
    assert tree(out(job)) == before


def test_a_folder_with_somebody_elses_files_is_refused_and_untouched(job: Job) -> None:
    out(job).mkdir()
    (out(job) / "precious.txt").write_text("x")
    with pytest.raises(OutputError, match=r"is not empty \(precious\.txt\).*choose an empty folder"):
        run_fake(job)
    assert tree(out(job)) == {"precious.txt": b"x"}


def test_files_of_others_in_an_output_survive_and_ours_do_not_linger(job: Job) -> None:
    run_fake(job)
    (out(job) / "notes.txt").write_text("mine")
    (out(job) / "results" / "stale.parquet").write_text("x")
    run_fake(job)
    assert (out(job) / "notes.txt").read_text() == "mine"
    assert not (out(job) / "results" / "stale.parquet").exists()


def test_an_output_inside_the_input_folder_is_not_read_as_input(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["x", "y"])})
    job = make_job(tmp_path, output={"uri": str(tmp_path / "in" / "out")})
    run_fake(job)
    before = published_bytes(job)
    backend = FakeBackend(failures=10**6)
    run_fake(job, backend)
    assert (published_bytes(job), backend.failures) == (before, 10**6)


@pytest.mark.parametrize("value", ["{", "[]", '{"name": 1}'])
def test_a_damaged_manifest_is_told_of(job: Job, value: str) -> None:
    run_fake(job)
    (out(job) / "manifest.json").write_text(value)
    with pytest.raises(DataError, match=r"manifest\.json: not "):
        run_fake(job)


def test_the_manifest_tells_what_made_it_and_holds_no_secret(job: Job) -> None:
    manifest = run_fake(job)
    assert manifest.made_by["tokenize"]["tokenizer"] == "fake-tokenizer"
    assert manifest.made_by["infer"]["pooling"] == "mean"
    assert sum(shard["rows_in"] for shard in manifest.shards) == manifest.counts.rows_in == 24


def test_groups_are_part_of_what_is_published(tmp_path: Path) -> None:
    rows = [{"text": "a b", "lang": "en"}, {"text": "c", "lang": "de"}, {"text": "d e f", "lang": "en"}]
    write_files(tmp_path, {"a.jsonl": jsonl(rows)})
    plain = make_job(tmp_path, input={"keep": ["lang"]})
    run_fake(plain)
    job = changed(plain, aggregate={"group_by": ["lang"]})
    backend = FakeBackend(failures=10**6)
    manifest = run_fake(job, backend)
    assert backend.failures == 10**6
    found = published(job, "groups")
    assert [(g["lang"], g["num_rows"], g["num_tokens"]) for g in found] == [("de", 1, 3), ("en", 2, 9)]
    assert len(manifest.groups) == 1
    assert run_fake(plain).groups == ()
    assert not list((out(job) / "groups").glob("*"))
