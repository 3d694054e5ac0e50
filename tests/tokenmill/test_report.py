"""The report: it balances, it escapes, it needs nothing else, and it can be made again."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tokenmill.accounting import Counts, Histogram
from tokenmill.engine import Run
from tokenmill.errors import ConfigError
from tokenmill.manifest import read_manifest
from tokenmill.parquet import FileInfo
from tokenmill.plan import Plan
from tokenmill.precision_gate import Agreement
from tokenmill.receipts import Receipt, Stage
from tokenmill.report import PAGE_FILE, REPORT_FILE, rebuild, report_data, summary, write_report
from tokenmill.report_page import MAX_TABLE_ROWS, opening_lines, render
from tokenmill.stages.aggregate import Finished, job_counts
from tokenmill.store import Store
from tokenmill.testing import FakeBackend, make_job, make_run

ROWS = [f'{{"text": "{"word " * n}", "lang": "en"}}' for n in range(1, 40)]
BAD_ROWS = ["{bad", '{"text": null, "lang": "en"}']


def start(folder: Path, lines: list[str] | None = None, **overrides: Any) -> tuple[Run, Plan]:
    """A claimed output with one shard per input file, nothing done yet."""
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for number in range(3):
        chosen = ROWS[number::3] + (BAD_ROWS if number == 1 else [])
        (source / f"{number}.jsonl").write_text("\n".join(lines or chosen) + "\n")
    job = make_job(folder, **{**overrides, "input": {"shard_bytes": 1, **overrides.get("input", {})}})
    run = make_run(job)
    plan = run.plan()
    run.claim(plan)
    return run, plan


def do(run: Run, plan: Plan, num_shards: int | None = None, backend: FakeBackend | None = None) -> None:
    """Both stages of the first shards, or of all."""
    for shard in plan.shards[:num_shards]:
        run.tokenize(shard)
        run.infer(shard, backend or FakeBackend())


def finish(folder: Path, backend: FakeBackend | None = None, **overrides: Any) -> Run:
    """A published output."""
    overrides = {"quality": {"max_reject_rate": 1}, **overrides}
    run, plan = start(folder, **overrides)
    do(run, plan, backend=backend)
    run.publish(plan, run.collect(plan))
    return run


def strict(data: bytes) -> Any:
    """JSON without the NaN and Infinity that Python would let pass."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(data, parse_constant=refuse)


def page_of(store: Store) -> str:
    return store.read_bytes(PAGE_FILE).decode()


def make_receipt(stage: Stage, shard: int = 0, reasons: Mapping[str, int] | None = None) -> Receipt:
    rejects = dict(reasons or {})
    counts = Counts(rows_in=10 + sum(rejects.values()), rows_out=10, tokens=80)
    counts.rejects.update(rejects)
    lengths = Histogram()
    lengths.add(8.0, 10)
    key = f"{stage}-{shard}"
    return Receipt(
        stage=stage,
        key=key,
        job="test-job",
        shard=shard,
        part=FileInfo(path=f"parts/{key}.parquet", rows=10, bytes=100, sha256="0" * 64),
        rejects=None,
        counts=counts,
        seconds={"read": 0.5, "compute": 1.0, "write": 0.25, "wall": 2.0},
        lengths=lengths,
    )


def make_finished(num_shards: int = 1, reasons: Mapping[str, int] | None = None) -> Finished:
    tokenize = tuple(make_receipt("tokenize", shard, reasons) for shard in range(num_shards))
    infer = tuple(make_receipt("infer", shard) for shard in range(num_shards))
    return Finished(tokenize=tokenize, infer=infer, counts=job_counts(tokenize, infer))


class Balanced(HTMLParser):
    """Raises unless every tag that opens is closed, and no id is given twice."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_well_formed(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert (parser.open, len(parser.ids)) == ([], len(set(parser.ids)))


def test_rows_in_are_rows_out_and_rejects_by_reason(tmp_path: Path) -> None:
    report = rebuild(finish(tmp_path).store)
    counts = report["counts"]
    assert counts["rejects"] == {"bad_json": 1, "null_text": 1}
    assert (counts["rows_in"], counts["rows_out"], counts["rows_rejected"]) == (41, 39, 2)
    assert sum(shard["rows_in"] for shard in report["shards"]) == counts["rows_in"]
    assert sum(shard["rows_out"] for shard in report["shards"]) == counts["rows_out"]
    assert sum(shard["rows_rejected"] for shard in report["shards"]) == counts["rows_rejected"]


def test_the_page_shows_the_account_and_that_it_balances(tmp_path: Path) -> None:
    run = finish(tmp_path)
    rebuild(run.store)
    page = page_of(run.store)
    text = " ".join(re.sub(r"<[^>]*>", " ", page.partition("</style>")[2]).split())
    assert (
        "Rows with a result 39 Rejected: bad_json 1 Rejected: null_text 1 = Rows read from the corpus 41"
        in text
    )
    assert "Balances, to the row" in text
    assert ">Published<" in page


def test_report_json_is_strict_json_and_says_what_rebuild_returns(tmp_path: Path) -> None:
    run = finish(tmp_path)
    report = rebuild(run.store)
    assert strict(run.store.read_bytes(REPORT_FILE)) == report


def test_the_page_is_well_formed_and_points_nowhere_else(tmp_path: Path) -> None:
    run = finish(tmp_path)
    rebuild(run.store)
    page = page_of(run.store)
    assert_well_formed(page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,", "report.json"}
    assert re.findall(r"://|url\(|@import|<script|<iframe", page) == []


def test_rebuilding_gives_the_same_bytes(tmp_path: Path) -> None:
    run = finish(tmp_path)
    rebuild(run.store)
    before = [run.store.read_bytes(name) for name in (REPORT_FILE, PAGE_FILE)]
    rebuild(run.store)
    assert [run.store.read_bytes(name) for name in (REPORT_FILE, PAGE_FILE)] == before


def test_rebuild_and_report_data_agree(tmp_path: Path) -> None:
    run = finish(tmp_path)
    finished = run.collect(run.claimed_plan())
    told = write_report(run.store, report_data(run.job, finished, read_manifest(run.store)))
    assert rebuild(run.store) == told


def test_an_unfinished_output_says_how_far_it_is_and_counts_what_is_done(tmp_path: Path) -> None:
    run, plan = start(tmp_path)
    do(run, plan, num_shards=1)
    run.tokenize(plan.shards[1])
    report = rebuild(run.store)
    assert report["state"] == {"shards": 3, "shards_tokenized": 2, "shards_done": 1, "published": "no"}
    assert (report["counts"]["rows_in"], report["counts"]["rows_out"]) == (13, 13)
    assert [shard["infer"] is None for shard in report["shards"]] == [False, True, True]
    page = page_of(run.store)
    assert_well_formed(page)
    assert "Unfinished: 1 of 3 shards done" in page
    assert "not tokenized yet" in page
    assert "Nothing is published yet." in page


def test_an_output_with_nothing_done_has_a_report_too(tmp_path: Path) -> None:
    run, _ = start(tmp_path)
    report = rebuild(run.store)
    assert (report["state"]["shards_done"], report["counts"]["rows_in"], report["lengths"]) == (0, 0, None)
    assert_well_formed(page_of(run.store))


def test_finished_but_not_published_is_said(tmp_path: Path) -> None:
    run, plan = start(tmp_path)
    do(run, plan)
    assert rebuild(run.store)["state"]["published"] == "no"
    assert "Done, not published" in page_of(run.store)


def test_a_dataset_of_other_shards_is_called_an_earlier_one(tmp_path: Path) -> None:
    run = finish(tmp_path)
    (tmp_path / "in" / "3.jsonl").write_text('{"text": "more"}\n')
    again = make_run(run.job)
    again.claim(again.plan())
    report = rebuild(run.store)
    assert (report["state"]["shards_done"], report["state"]["published"]) == (3, "earlier")
    assert "An earlier dataset is published" in page_of(run.store)


def test_a_job_without_a_model_is_done_when_it_is_tokenized(tmp_path: Path) -> None:
    run, plan = start(tmp_path, inference={"model": None}, tokenizer={"name": "fake"})
    for shard in plan.shards:
        run.tokenize(shard)
    report = rebuild(run.store)
    assert (report["state"]["shards_done"], report["model"], list(report["stages"])) == (
        3,
        None,
        ["tokenize"],
    )
    page = page_of(run.store)
    assert_well_formed(page)
    assert "Rows tokenized" in page


def test_a_corpus_of_rejects_alone_has_a_report(tmp_path: Path) -> None:
    run, plan = start(tmp_path, lines=["{bad"])
    do(run, plan)
    report = rebuild(run.store)
    assert (report["counts"]["rows_out"], report["counts"]["rejects"]) == (0, {"bad_json": 3})
    assert_well_formed(page_of(run.store))


def test_a_folder_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an output of tokenmill"):
        rebuild(Store.open(str(tmp_path)))


def test_what_only_the_run_knew_is_remembered_by_a_rebuild(tmp_path: Path) -> None:
    run = finish(tmp_path)
    finished = run.collect(run.claimed_plan())
    manifest = read_manifest(run.store)
    gates = [{"name": "tokens", "success": True, "checks": []}]
    skipped = {"of unknown kind": 2}
    write_report(
        run.store, report_data(run.job, finished, manifest, gates=gates, skipped=skipped, wall_seconds=12.5)
    )
    report = rebuild(run.store)
    assert (report["gates"], report["skipped"], report["wall_seconds"]) == (gates, skipped, 12.5)


@pytest.mark.parametrize(("speed", "told"), [(1.52, ", 1.5 times as fast."), (None, "at least 0.99).")])
def test_how_near_int8_was_is_told(tmp_path: Path, speed: float | None, told: str) -> None:
    run = finish(tmp_path)
    agreement = Agreement(
        precision="int8", measure="mean cosine", value=0.99721, least=0.99, rows=160, tokens=9, speed=speed
    ).to_json()
    data = report_data(run.job, run.collect(run.claimed_plan()), None, agreement=agreement)
    report = write_report(run.store, data)
    assert summary(report)["agreement"] == agreement
    page = run.store.read_bytes(PAGE_FILE).decode()
    assert "int8 agrees with fp32 by 0.9972 (mean cosine of 160 rows; at least 0.99)" in page
    assert told in page


def test_what_an_earlier_run_knew_is_forgotten_when_the_shards_change(tmp_path: Path) -> None:
    run = finish(tmp_path)
    finished = run.collect(run.claimed_plan())
    write_report(run.store, report_data(run.job, finished, None, wall_seconds=12.5))
    (tmp_path / "in" / "3.jsonl").write_text('{"text": "more"}\n')
    again = make_run(run.job)
    again.claim(again.plan())
    assert rebuild(run.store)["wall_seconds"] is None


@pytest.mark.parametrize("former", [b"{", b"[]", b'{"report_version": 0}'])
def test_an_unreadable_former_report_is_replaced(tmp_path: Path, former: bytes) -> None:
    run = finish(tmp_path)
    run.store.write_bytes(REPORT_FILE, former)
    report = rebuild(run.store)
    assert strict(run.store.read_bytes(REPORT_FILE)) == report


def test_text_of_the_user_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    job = make_job(tmp_path, input={"uri": f"/in/{evil}", "keep": [evil]}, inference={"model": evil})
    gates = [
        {"name": evil, "checks": [{"expectation": evil, "column": evil, "severity": evil, "success": False}]}
    ]
    report = report_data(job, make_finished(reasons={evil: 2}), None, gates=gates, skipped={evil: 1})
    store = Store.open(str(tmp_path / "<script>" / "out"))
    write_report(store, report)
    page = page_of(store)
    assert_well_formed(page)
    assert "<script" not in page
    assert page.count(html.escape(evil)) >= 6


def test_values_that_are_no_numbers_never_reach_the_json(tmp_path: Path) -> None:
    gates = [
        {"name": "g", "checks": [{"expectation": "e", "success": True, "unexpected_count": float("nan")}]}
    ]
    report = report_data(
        make_job(tmp_path),
        make_finished(),
        None,
        gates=gates,
        wall_seconds=float("inf"),
        skipped={"a\ud800": 1},
    )
    store = Store.open(str(tmp_path / "out"))
    write_report(store, report)
    written = strict(store.read_bytes(REPORT_FILE))
    assert (written["wall_seconds"], written["gates"][0]["checks"][0]["unexpected_count"]) == (None, None)


def test_no_credentials_are_shown(tmp_path: Path) -> None:
    uris = ["https://me:hunter2@host/a.parquet", "https://host/b.parquet?X-Amz-Signature=hunter2"]
    job = make_job(tmp_path)  # which would refuse them; a job file of an older version may hold them
    job = job.model_copy(update={"input": job.input.model_copy(update={"uri": uris})})
    report = report_data(job, make_finished(), None)
    store = Store.open(str(tmp_path / "out"))
    write_report(store, report)
    assert "hunter2" not in page_of(store) + store.read_bytes(REPORT_FILE).decode()
    assert report["job"]["input"] == ["https://host/a.parquet", "https://host/b.parquet?..."]


def test_code_that_ships_with_the_model_is_pointed_out(tmp_path: Path) -> None:
    off = render({**report_data(make_job(tmp_path), make_finished(), None), **OUTSIDE})
    job = make_job(tmp_path, inference={"trust_remote_code": True})
    on = render({**report_data(job, make_finished(), None), **OUTSIDE})
    warning = "Runs code that ships with the model"
    assert (warning in off, warning in on) == (False, True)


OUTSIDE = {"output": "out", "data_docs": None}


def test_halved_batches_are_shown(tmp_path: Path) -> None:
    run = finish(tmp_path, backend=FakeBackend(memory_tokens=50, default_batch_tokens=200))
    report = rebuild(run.store)
    assert report["stages"]["infer"]["out_of_memory"] > 0
    assert "did not fit into memory" in page_of(run.store)


def test_the_page_caps_the_table_and_the_json_has_all_shards(tmp_path: Path) -> None:
    report = report_data(make_job(tmp_path), make_finished(MAX_TABLE_ROWS + 50), None)
    page = render({**report, **OUTSIDE})
    assert len(report["shards"]) == MAX_TABLE_ROWS + 50
    assert page.count('<tr><th scope="row">0</th>') == 1
    assert f'<th scope="row">{MAX_TABLE_ROWS - 1}</th>' in page
    assert f'<th scope="row">{MAX_TABLE_ROWS}</th>' not in page
    assert "The first 200 of 250" in page


@dataclass(frozen=True)
class Check:
    expectation: str
    column: str | None
    severity: str
    success: bool
    unexpected_count: int | None


@dataclass(frozen=True)
class Gate:
    name: str
    success: bool
    checks: tuple[Check, ...]


def test_gates_may_be_objects_or_dicts(tmp_path: Path) -> None:
    check = {
        "expectation": "e",
        "column": "c",
        "severity": "critical",
        "success": False,
        "unexpected_count": 3,
    }
    as_dict = {"name": "tokens", "success": False, "checks": [check]}
    as_object = Gate("tokens", False, (Check("e", "c", "critical", False, 3),))
    reports = [
        report_data(make_job(tmp_path), make_finished(), None, gates=[gate]) for gate in (as_dict, as_object)
    ]
    assert [report["gates"] for report in reports] == [[as_dict], [as_dict]]
    assert '<span class="pill bad">failed</span>' in render({**reports[0], **OUTSIDE})


def test_data_docs_are_linked_where_they_are(tmp_path: Path) -> None:
    run = finish(tmp_path)
    rebuild(run.store)
    without = page_of(run.store)
    run.store.write_bytes("report/data-docs/index.html", b"<html></html>")
    rebuild(run.store)
    link = 'href="data-docs/index.html"'
    assert (link in without, link in page_of(run.store)) == (False, True)


def test_the_lines_for_pandas_and_duckdb_open_the_results(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" folder'
    folder.mkdir()
    run = finish(folder)
    report = rebuild(run.store)
    page = page_of(run.store)
    for library, code in opening_lines(report["output"])[:2]:
        names: dict[str, Any] = {}
        exec(code, names)
        assert (library, len(names["rows"])) == (library, 39)
        assert html.escape(code) in page.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")


def test_seconds_of_a_stage_are_divided_without_rest(tmp_path: Path) -> None:
    stage = report_data(make_job(tmp_path), make_finished(2), None)["stages"]["infer"]
    expected = {"read": 1.0, "compute": 2.0, "write": 0.5, "other": 0.5}
    assert (stage["seconds_by_activity"], stage["seconds"], stage["idle_share"]) == (expected, 4.0, 0.5)
    assert stage["held_back_by"] == "Computing took 50 % of the time; next comes waiting for rows, 25 %."


def test_no_quantile_of_the_lengths_exceeds_the_limit(tmp_path: Path) -> None:
    run = finish(tmp_path, tokenizer={"max_tokens": 16})
    lengths = rebuild(run.store)["lengths"]
    assert lengths["p100"] == lengths["max_tokens"] == 16
    assert lengths["total"] == 39


def test_the_receipts_of_two_machines_show_both_devices(tmp_path: Path) -> None:
    finished = make_finished(2)
    infer = [replace(r, backend={"device": d}) for r, d in zip(finished.infer, ("cpu", "cuda"), strict=True)]
    report = report_data(make_job(tmp_path), replace(finished, infer=tuple(infer)), None)
    assert report["model"]["backend"] == {"device": ["cpu", "cuda"]}


def test_a_summary_is_small_and_keeps_the_counts(tmp_path: Path) -> None:
    report = report_data(make_job(tmp_path), make_finished(500), None)
    short = summary(report)
    assert short["counts"] == report["counts"]
    assert len(json.dumps(short)) < 5000


def test_pages_made_by_several_threads_are_the_same(tmp_path: Path) -> None:
    report = {**report_data(make_job(tmp_path), make_finished(20), None), **OUTSIDE}
    make: Callable[[int], str] = lambda _: render(report)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, range(8)))) == 1


def test_a_report_in_a_bucket_names_the_bucket(tmp_path: Path) -> None:
    store = Store.open("memory://reports/out")
    report = write_report(store, report_data(make_job(tmp_path), make_finished(), None))
    duckdb = dict(opening_lines(report["output"]))["DuckDB"]
    assert 'register_filesystem(fsspec.filesystem("memory"))' in duckdb
    assert duckdb.endswith('read_parquet("memory://reports/out/results/*.parquet")')
    assert strict(store.read_bytes(REPORT_FILE))["output"] == "memory://reports/out"
