"""Quality gates: what must hold of the token parts and of the result parts before they are used.

    part -> frames of figures (gate_figures) -> expectations (expectations) -> checks (-> data_docs)

A gate reads every row, a bounded number at a time, and changes none. What a check finds wrong is named:
shard, file, row and value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from tokenmill.data_docs import write_data_docs
from tokenmill.errors import QualityError
from tokenmill.expectations import Check, Gate, GateResult, open_gx
from tokenmill.gate_figures import ROW_KEY, iter_frames, result_figures, token_figures
from tokenmill.plan import Plan
from tokenmill.receipts import Receipt
from tokenmill.settle import Setup, TokenizeSetup
from tokenmill.store import Store

__all__ = ["Check", "GateResult", "check_results", "check_tokens", "raise_if_critical", "write_data_docs"]

UNIT_TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "float16": 5e-3}


def raise_if_critical(result: GateResult) -> None:
    """Raises QualityError for the first failed check of critical severity."""
    failed = result.failed("critical")
    if not failed:
        return
    check, more = failed[0], len(failed) - 1
    example = f", e.g. {check.examples[0]}" if check.examples else ""
    others = f" (and {more} more checks failed)" if more else ""
    redo = f"delete {' and '.join(check.redo)} and run again to redo its shard"
    raise QualityError(
        f"gate {result.name}: {check.expectation}({check.column}) failed {check.unexpected_count} times"
        f"{example}{others}; not published: {redo if check.redo else 'see report/'}"
    )


def check_tokens(
    plan: Plan,
    setup: TokenizeSetup,
    store: Store,
    receipts: Sequence[Receipt],
    *,
    max_unknown_rate: float | None = None,
) -> GateResult:
    """Hold the token parts against the vocabulary, the row limit and their receipts.

    receipts: of the plan's shards, in its order.  max_unknown_rate: `quality.max_unknown_rate`;
    above it is a warning.  Raises DataError, StoreError.
    """
    vocabulary = setup.model_vocab_size or setup.tokenizer.info.vocab_size
    with open_gx() as gx:
        gate = Gate("tokens", "tokenize", plan, store, gx)
        gate.expect(
            "rows",
            gate.between("min_id", 0, None),
            gate.between("max_id", None, vocabulary - 1),
            gate.between("num_tokens", 1, setup.max_tokens),
            gate.equal("num_tokens", "num_ids"),
            *map(gate.present, ROW_KEY),
        )
        parts = gate.parts()
        sums: Counter[str] = Counter()
        for frame in iter_frames(store, parts, ("input_ids", "num_tokens", "num_unknown"), token_figures):
            gate.check_rows(frame)
            sums.update({name: int(frame[name].sum()) for name in ("num_tokens", "num_unknown")})
        gate.check_counts(receipts)
        if max_unknown_rate is not None:
            rate = sums["num_unknown"] / max(1, sums["num_tokens"])
            gate.expect("dataset", gate.between("unknown_rate", None, max_unknown_rate, "warning"))
            gate.check("dataset", pa.table({"unknown_rate": [rate]}).to_pandas())
        return gate.result()


def check_results(plan: Plan, setup: Setup, store: Store, receipts: Sequence[Receipt]) -> GateResult:
    """Hold the result parts against their receipts: each row once, its values finite and what those of
    its task can be.

    receipts: of the plan's shards, in its order.  Raises ConfigError, DataError, StoreError.
    """
    limits = _limits_of(setup)
    columns = COLUMNS[setup.job.inference.task]
    with open_gx() as gx:
        gate = Gate("results", "infer", plan, store, gx)
        gate.expect(
            "rows",
            gate.between("num_nonfinite", None, 0),
            *(gate.between(name, low, high) for name, (low, high) in limits.items()),
            gate.between("row_step", 1, None),
            *map(gate.present, ROW_KEY),
        )
        for frame in iter_frames(store, gate.parts(), columns, result_figures(columns)):
            gate.check_rows(frame)
        gate.check_counts(receipts)
        return gate.result()


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "classify": ("score",),
    "rank": ("score",),
    "score": ("nll", "num_scored"),
    "generate": ("num_prompt_tokens", "num_output_tokens"),
}


def _limits_of(setup: Setup) -> dict[str, tuple[float | None, float | None]]:
    """Lowest and highest of each figure of the job's task."""
    spec, infer = setup.job.inference, setup.need_model()
    if spec.task == "embed":
        tolerance = UNIT_TOLERANCE[spec.dtype]
        return {"norm": (1 - tolerance, 1 + tolerance)} if infer.recipe.normalize else {}
    if spec.task == "score":
        return {"nll": (0, None), "num_scored": (0, None)}
    if spec.task == "generate":
        most = spec.max_new_tokens * spec.num_outputs
        return {"num_prompt_tokens": (1, None), "num_output_tokens": (spec.num_outputs, most)}
    assert infer.labels is not None
    return {} if infer.labels.activation == "none" else {"score": (0, 1)}
