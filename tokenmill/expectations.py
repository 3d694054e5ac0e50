"""Great Expectations, adapted: one run of a gate, from frames to checks.

Only this module and `tokenmill.data_docs` import great_expectations, and only inside functions: the
import takes seconds. What is expected is for `tokenmill.gates` to say.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tokenmill.gate_figures import ROW_KEY
from tokenmill.plan import Plan
from tokenmill.receipts import Receipt, Stage, part_name, receipt_name
from tokenmill.store import Store

if TYPE_CHECKING:
    import pandas as pd

MAX_EXAMPLES = 3
MAX_PAGES = 20  # of a gate's Data Docs: its first frames, and as many failed ones on top
PLACE = ("shard", *ROW_KEY)  # columns that say where a row is; the others are what is checked
Identity = tuple[str, str, str]
GX_LOCK = threading.Lock()  # GX has one current context for the whole process


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One expectation over everything that a gate read.

    redo: the receipts to delete so that the next run redoes the first bad shard.
    """

    expectation: str
    column: str
    severity: str
    success: bool
    unexpected_count: int
    examples: tuple[str, ...] = ()
    redo: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """What a gate found. `suites` and `validations` (of some frames) are GX's own, for Data Docs."""

    name: str
    num_rows: int
    checks: tuple[Check, ...]
    suites: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    validations: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def success(self) -> bool:
        """Whether no critical check failed. Warnings do not count."""
        return not self.failed("critical")

    def failed(self, severity: str) -> tuple[Check, ...]:
        """Failed checks of "critical" or "warning"."""
        return tuple(c for c in self.checks if not c.success and c.severity == severity)

    def to_json(self) -> dict[str, Any]:
        checks = [{**asdict(c), "examples": [*c.examples], "redo": [*c.redo]} for c in self.checks]
        return {"name": self.name, "num_rows": self.num_rows, "success": self.success, "checks": checks}


@contextmanager
def open_gx() -> Iterator[Any]:
    """The module, silent and offline, for one gate at a time."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with GX_LOCK:
        # Subtle: a filter that stays is safe beside other threads; catch_warnings() is not.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="great_expectations")
        import great_expectations
        import great_expectations.expectations

        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        yield great_expectations


def make_context(gx: Any, sites: Mapping[str, Any]) -> Any:
    """A GX context that lives in memory, without progress bars."""
    from great_expectations.data_context.types import base

    config = base.DataContextConfig(
        store_backend_defaults=base.InMemoryStoreBackendDefaults(),
        data_docs_sites=dict(sites),
        progress_bars=base.ProgressBarsConfig(globally=False),
        analytics_enabled=False,
    )
    return gx.get_context(mode="ephemeral", project_config=config)


@dataclass(slots=True)
class _Tally:
    """What came of one expectation so far. `columns` are those that it looks at."""

    columns: tuple[str, ...]
    success: bool = True
    unexpected_count: int = 0
    examples: list[str] = field(default_factory=list)
    first_shard: int | None = None

    def add(self, result: Any, frame: pd.DataFrame) -> None:
        found = result.result
        assert found, result.exception_info  # GX could not evaluate it: a defect of the frame
        self.success &= bool(result.success)
        self.unexpected_count += int(found["unexpected_count"])
        for row in found["partial_unexpected_index_list"][: MAX_EXAMPLES - len(self.examples)]:
            cells = {name: frame[name].iloc[row] for name in (*PLACE, *self.columns) if name in frame}
            self.examples.append(_example(cells))
            self.first_shard = cells.get("shard") if self.first_shard is None else self.first_shard


class Gate:
    """One run of a gate: its expectations, what came of each, and the results that Data Docs show."""

    def __init__(self, name: str, stage: Stage, plan: Plan, store: Store, gx: Any) -> None:
        self._name, self._stage, self._plan, self._store, self._gx = name, stage, plan, store, gx
        asset = make_context(gx, {}).data_sources.add_pandas("parts").add_dataframe_asset(name)
        self._data = asset.add_batch_definition_whole_dataframe("frame")
        self._suites: dict[str, Any] = {}
        self._tallies: dict[Identity, _Tally] = {}
        self._rows_of_shard: Counter[int] = Counter()
        self._validations: list[Any] = []
        self._started = datetime.now(UTC)

    def between(self, column: str, low: float | None, high: float | None, severity: str = "critical") -> Any:
        make = self._gx.expectations.ExpectColumnValuesToBeBetween
        return make(column=column, min_value=low, max_value=high, severity=severity)

    def equal(self, one: str, other: str) -> Any:
        make = self._gx.expectations.ExpectColumnPairValuesToBeEqual
        return make(column_A=one, column_B=other, severity="critical")

    def present(self, column: str) -> Any:
        return self._gx.expectations.ExpectColumnValuesToNotBeNull(column=column, severity="critical")

    def expect(self, suite: str, *expectations: Any) -> None:
        """Declare what must hold of every frame that is checked under this name."""
        name = f"{self._name}-{suite}"
        self._suites[suite] = self._gx.ExpectationSuite(name=name, expectations=list(expectations))
        for config in self._suites[suite].expectation_configurations:
            self._tallies[_identity(config)] = _Tally(columns=_columns(config))

    def parts(self) -> list[tuple[int, str]]:
        """Shard and name of each part, in order."""
        keys = self._plan.keys_of(self._stage)
        pairs = zip(self._plan.shards, keys, strict=True)
        return [(shard.index, part_name(self._stage, key)) for shard, key in pairs]

    def check_rows(self, frame: pd.DataFrame) -> None:
        self._rows_of_shard.update(frame["shard"].tolist())
        first, last = frame["shard"].iloc[[0, -1]]
        self.check("rows", frame, f"shards-{first}-to-{last}")

    def check_counts(self, receipts: Sequence[Receipt]) -> None:
        """Hold the number of rows read of each part against its receipt."""
        shards = [shard.index for shard in self._plan.shards]
        figures = {
            "shard": shards,
            "num_rows": [self._rows_of_shard[shard] for shard in shards],
            "num_rows_of_receipt": [receipt.part.rows for receipt in receipts],
        }
        self.expect("parts", self.equal("num_rows", "num_rows_of_receipt"))
        self.check("parts", pa.table(figures).to_pandas())

    def check(self, suite: str, frame: pd.DataFrame, label: str = "all") -> None:
        # Subtle: by default GX names rows by place; with named index columns it takes 30 times as long.
        wanted = {"result_format": "SUMMARY", "partial_unexpected_count": MAX_EXAMPLES}
        batch = self._data.get_batch(batch_parameters={"dataframe": frame})
        validation = batch.validate(self._suites[suite], result_format=wanted)
        for result in validation.results:
            self._tallies[_identity(result.expectation_config)].add(result, frame)
        self._keep(validation, suite, label)

    def _keep(self, validation: Any, suite: str, label: str) -> None:
        """Give it a name of its own for Data Docs, unless there are pages enough."""
        from great_expectations.core.run_identifier import RunIdentifier

        number = len(self._validations)
        if suite == "rows" and number >= (MAX_PAGES if validation.success else 2 * MAX_PAGES):
            return
        run_id = RunIdentifier(run_name=f"{number:02d}-{label}", run_time=self._started)
        validation.meta.update(run_id=run_id, validation_time=self._started)
        self._validations.append(validation)

    def result(self) -> GateResult:
        return GateResult(
            name=self._name,
            num_rows=self._rows_of_shard.total(),
            checks=tuple(self._check_of(*identity, tally) for identity, tally in self._tallies.items()),
            suites=tuple(self._suites.values()),
            validations=tuple(self._validations),
        )

    def _check_of(self, expectation: str, column: str, severity: str, tally: _Tally) -> Check:
        return Check(
            expectation=expectation,
            column=column,
            severity=severity,
            success=tally.success,
            unexpected_count=tally.unexpected_count,
            examples=tuple(tally.examples),
            redo=() if tally.first_shard is None else self._redo(tally.first_shard),
        )

    def _redo(self, index: int) -> tuple[str, ...]:
        """The receipts that there are of a shard, from the gate's own stage on."""
        shard = next(shard for shard in self._plan.shards if shard.index == index)
        names = [receipt_name("tokenize", shard.tokens_key), receipt_name("infer", shard.results_key)]
        present = self._store.sizes("receipts")
        return tuple(name for name in names[self._stage == "infer" :] if name in present)


def _columns(config: Any) -> tuple[str, ...]:
    named = (config.kwargs.get(name) for name in ("column", "column_A", "column_B"))
    return tuple(name for name in named if name)


def _identity(config: Any) -> Identity:
    """Type, columns and severity of an expectation: unique within a gate."""
    return config.type, ", ".join(_columns(config)), str(config.severity.value)


def _example(cells: Mapping[str, Any]) -> str:
    """Example: {"shard": 3, "source_file": "a.csv", "row_ordinal": 17, "max_id": 99999} ->
    "shard 3, a.csv row 17: max_id 99999"."""
    forms = {"shard": "shard {}", "source_file": ", {}", "row_ordinal": " row {}"}
    where = "".join(form.format(_shown(cells[name])) for name, form in forms.items() if name in cells)
    found = ", ".join(f"{name} {_shown(value)}" for name, value in cells.items() if name not in PLACE)
    return ": ".join(filter(None, (where, found)))


def _shown(value: Any) -> str:
    """Example: 17.0 -> "17", nan -> "null": pandas makes floats of integers beside a null."""
    if isinstance(value, float):
        if math.isnan(value):
            return "null"
        return str(int(value)) if value.is_integer() else f"{value:.6g}"
    return str(value)
