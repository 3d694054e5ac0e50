"""The model backend's whole contract, on one page. No torch here.

Legend: B rows of a batch, L tokens of its longest row, V values of a row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo:
    """What the engine must know of a loaded model, and what a receipt says of it.

    matmul: how exactly float32 matrices are multiplied, as torch calls it ("highest": no TF32).
    num_values: V, what a task makes of a row: the dimensions of a vector, a score a label, ...
    (`tokenmill.results` says what each value is).
    """

    model_type: str
    num_parameters: int
    device: str
    precision: str
    matmul: str
    num_values: int
    pad_id: int
    default_batch_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Backend(Protocol):
    """A model on a device, with the head of one task. `run` is called from one thread at a time."""

    @property
    def info(self) -> BackendInfo: ...

    def run(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        starts_B: npt.NDArray[np.int64] | None = None,
    ) -> Values:
        """The values of each row, shape (B, V); what lies beyond a row's length is padding.

        starts_B: where the second text of each row begins, if rows are pairs; to score, the first token
        that counts, if rows are chunks (of a first chunk 0).
        Raises OutOfMemoryError if the batch does not fit: the engine halves it.
        Raises BackendError, BackendUnavailableError.
        """
        ...

    def in_fp32(self) -> Backend | None:
        """The same model in float32, for rows whose values came out NaN or infinite.

        None if this one is, or if there is no memory for it.  Raises BackendError.
        """
        ...

    def device_memory_bytes(self) -> int:
        """Most memory held on the device so far; 0 where the device is the CPU."""
        ...
