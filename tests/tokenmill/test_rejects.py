"""Rejects by reason, and out again as lines to mend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from outputs import jsonl, open_fake, published, run_fake, write_files

from tokenmill.errors import ConfigError, OutputError, RejectLimitError
from tokenmill.rejects import count_rejects, export_rejects
from tokenmill.store import Store
from tokenmill.testing import FakeBackend, make_job, make_run, word_id

ROWS = [{"text": "fine", "id": "a"}, {"text": None, "id": "b"}, {"id": "c"}, {"text": None, "id": "d"}]


@pytest.fixture
def output(tmp_path: Path) -> Store:
    """The output of a run that stopped at its limit of rejects."""
    write_files(tmp_path, {"a.jsonl": jsonl(ROWS) + "{broken\n"})
    job = make_job(tmp_path, input={"id": "id", "keep": []})
    with pytest.raises(RejectLimitError):
        run_fake(job)
    return open_fake(job).store


def test_rejects_are_told_by_reason_with_samples(output: Store) -> None:
    data = count_rejects(output)
    assert {reason: entry["rows"] for reason, entry in data["reasons"].items()} == {
        "null_text": 2,
        "missing_text": 1,
        "bad_json": 1,
    }
    assert data["rows"] == 4
    sample = data["reasons"]["bad_json"]["samples"][0]
    assert (sample["row_ordinal"], sample["text"]) == (4, "{broken")


def test_exported_rejects_are_mended_and_run_again(output: Store, tmp_path: Path) -> None:
    path = tmp_path / "mended.jsonl"
    assert export_rejects(output, path) == {"exported": 4, "to": str(path)}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["b", "c", "d", None]
    path.write_text(jsonl([{**row, "text": f"mended {row['id']}"} for row in rows]))
    job = make_job(tmp_path, input={"uri": str(path), "id": "id"}, output={"uri": str(tmp_path / "again")})
    run_fake(job)
    assert [row["id"] for row in published(job)] == ["b", "c", "d", None]


def test_a_file_that_is_there_is_not_overwritten(output: Store, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("work")
    with pytest.raises(OutputError, match="exists; give a new file"):
        export_rejects(output, path)
    assert path.read_text() == "work"


def test_what_the_model_rejected_is_exported_with_the_text_of_the_corpus(tmp_path: Path) -> None:
    rows = [{"q": "good", "a": "x"}, {"q": "bad one", "a": "y"}, {"q": "z", "a": "bad two"}]
    write_files(tmp_path, {"a.jsonl": jsonl(rows), "b.jsonl": jsonl([{"q": "never", "a": "bad"}])})
    job = make_job(
        tmp_path,
        input={"text": "q", "pair": "a", "keep": ["a"], "shard_bytes": 1},
        quality={"max_reject_rate": 1},
    )
    run_fake(job, FakeBackend(nan_ids=frozenset({word_id("bad")})))
    store = open_fake(job).store

    def exported(name: str) -> list[tuple[str, str | None, str | None]]:
        export_rejects(store, tmp_path / name, make_run)
        lines = map(json.loads, (tmp_path / name).read_text().splitlines())
        return [(line["reason"], line["text"], line.get("pair")) for line in lines]

    whole = [("non_finite", "bad one", "y"), ("non_finite", "z", "bad two"), ("non_finite", "never", "bad")]
    assert exported("1") == whole
    (tmp_path / "in/b.jsonl").write_text(jsonl([{"q": "other", "a": "text"}]))
    assert exported("2") == [*whole[:2], ("non_finite", None, None)]
    shutil.rmtree(tmp_path / "in")
    told = export_rejects(store, tmp_path / "3", make_run)
    assert (told["exported"], told["without_text"]) == (3, 3)
    assert "in does not exist" in told["problem"]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an output of tokenmill"):
        count_rejects(Store.open(str(tmp_path)))
