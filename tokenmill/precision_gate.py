"""Whether int8 is near enough to float32, and worth it: a sample of the job's own rows, computed both ways.

Legend: N rows of the sample, V values of each (`BackendInfo.num_values`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.accounting import per_second
from tokenmill.backend import Backend
from tokenmill.errors import BackendUnavailableError, ConfigError
from tokenmill.model_size import memory_bytes, read_size
from tokenmill.settle import InferSetup
from tokenmill.stages.infer_shard import Inferring, Window

GATE_ROWS = 64  # of a shard
GATE_TOKENS = 4096  # of a shard
SLOWER = 0.9  # of float32's speed; less is refused
TIMED_S = 1.0  # what float32 must take for the two to be compared

ValuesNV = npt.NDArray[Any]


def refuse_slow_precision(infer: InferSetup, device: str) -> None:
    """Raises ConfigError for bf16 or fp16 on a CPU that takes longer for it, if float32 has the memory."""
    from tokenmill.torch_device import device_memory, layer_speed

    asked = infer.job.inference.precision
    if device != "cpu" or asked not in ("bf16", "fp16"):
        return
    speed = layer_speed(asked, device)
    if speed < SLOWER and memory_bytes(read_size(infer.folder), "fp32", 0) < device_memory(device):
        raise ConfigError(
            f"inference.precision: {asked} runs at {speed:.2f} of the speed of fp32 on this CPU; "
            "use fp32, or auto"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What the sample showed.  measure: what `value` is.  speed: times as fast; None: too short to tell."""

    precision: str
    measure: str
    value: float
    least: float
    rows: int
    tokens: int
    speed: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def hold_against_fp32(
    windows: Iterable[Window], low: Backend, infer: InferSetup, max_batch_tokens: int | None
) -> Agreement | None:
    """Compute the windows in low precision and in float32; None without any rows.

    Raises ConfigError if they agree too little, or if low precision takes longer; BackendError.
    """
    exact = low.in_fp32()
    if exact is None:
        raise BackendUnavailableError("no memory for the float32 model that a sample is held against")
    seconds = {"low": 0.0, "exact": 0.0}
    values: dict[str, list[ValuesNV]] = {"low": [], "exact": []}
    num_tokens = 0
    for whole in windows:
        window = _head(whole)
        num_tokens += len(window.ids)
        for name, backend in (("exact", exact), ("low", low)):
            worker = Inferring(
                backend,
                infer.result_columns(backend.info.num_values),
                max_batch_tokens or backend.info.default_batch_tokens,
            )
            if not values[name]:
                worker.run(_head(window, num_rows=1))  # the first call sets up what the others use
            start = time.perf_counter()
            values[name].append(worker.run(window)[0])
            seconds[name] += time.perf_counter() - start
    if not values["low"]:
        return None
    low_NV, exact_NV = (np.concatenate(values[name]).astype(np.float64) for name in ("low", "exact"))
    spec = infer.job.inference
    measure, agree = MEASURES[spec.task]
    several = infer.labels is not None and infer.labels.several
    found = Agreement(
        precision=low.info.precision,
        measure=measure,
        value=agree(exact_NV, low_NV, spec.threshold if several else None),
        least=spec.min_agreement,
        rows=len(low_NV),
        tokens=num_tokens,
        speed=per_second(seconds["exact"], seconds["low"]) if seconds["exact"] > TIMED_S else None,
    )
    _judge(found)
    return found


def _head(window: Window, num_rows: int = GATE_ROWS) -> Window:
    """The first rows of a window, at least one, GATE_TOKENS together."""
    fitting = int(np.searchsorted(window.offsets_N1, GATE_TOKENS, side="right")) - 1
    num = max(1, min(num_rows, fitting, len(window.lengths_N)))
    offsets_N1 = window.offsets_N1[: num + 1]
    return Window(
        columns=window.columns.slice(0, num),
        ids=window.ids[: offsets_N1[-1]],
        offsets_N1=offsets_N1,
        starts_N=None if window.starts_N is None else window.starts_N[:num],
    )


def _judge(found: Agreement) -> None:
    """Raises ConfigError."""
    if not found.value >= found.least:
        raise ConfigError(
            f"inference.precision: {found.precision} agrees with fp32 by {found.value:.4f} only "
            f"({found.measure} of {found.rows} rows of this job), inference.min_agreement is "
            f"{found.least:g}; use fp32"
        )
    if found.speed is not None and found.speed < SLOWER:
        raise ConfigError(
            f"inference.precision: {found.precision} runs at {found.speed:.2f} of the speed of fp32 on this "
            f"machine ({found.rows} rows of this job); use fp32, or auto"
        )


# --- one measure a task: 1.0 where nothing differs ---

Agree = Callable[[ValuesNV, ValuesNV, float | None], float]


def _cosine(exact_NV: ValuesNV, low_NV: ValuesNV, threshold: float | None) -> float:
    del threshold
    norms_N = np.linalg.norm(exact_NV, axis=1) * np.linalg.norm(low_NV, axis=1)
    return float(np.mean((exact_NV * low_NV).sum(axis=1) / np.maximum(norms_N, 1e-12)))


def _decisions(exact_NV: ValuesNV, low_NV: ValuesNV, threshold: float | None) -> float:
    """threshold: of several labels a row; all of a row's must be the same."""
    if threshold is None:
        return float(np.mean(exact_NV.argmax(axis=1) == low_NV.argmax(axis=1)))
    return float(np.mean(((exact_NV >= threshold) == (low_NV >= threshold)).all(axis=1)))


def _correlation(exact_NV: ValuesNV, low_NV: ValuesNV, threshold: float | None) -> float:
    """Of the scores; 1 where all rows have one score in both."""
    del threshold
    exact_N, low_N = (values_NV[:, 0] - values_NV[:, 0].mean() for values_NV in (exact_NV, low_NV))
    size = float(np.linalg.norm(exact_N) * np.linalg.norm(low_N))
    return float(exact_N @ low_N) / size if size > 1e-12 else float(np.allclose(exact_N, low_N))


def _likelihood(exact_NV: ValuesNV, low_NV: ValuesNV, threshold: float | None) -> float:
    del threshold
    scored_N = exact_NV[:, 1] > 0
    exact_N, low_N = exact_NV[scored_N, 0], low_NV[scored_N, 0]
    errors_N = np.abs(low_N - exact_N) / np.maximum(exact_N, 1e-12)
    return 1 - float(errors_N.mean()) if len(errors_N) else 1.0


MEASURES: Mapping[str, tuple[str, Agree]] = {
    "embed": ("mean cosine", _cosine),
    "classify": ("share of the same labels", _decisions),
    "rank": ("correlation of the scores", _correlation),
    "score": ("1 - mean relative error of nll", _likelihood),
}
