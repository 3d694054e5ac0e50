"""The model backend's whole contract, on one page. No torch here.

Legend: B rows of a batch, L tokens of its longest row, D dimensions of a vector.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendInfo:
    """What the engine must know of a loaded model, and what a receipt says of it."""

    model_type: str
    num_parameters: int
    device: str
    precision: str
    pooling: str
    normalized: bool
    dimensions: int
    pad_id: int
    default_batch_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class EmbedBackend(Protocol):
    """A model on a device. `embed` is called from one thread at a time."""

    @property
    def info(self) -> BackendInfo: ...

    def embed(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        pair_starts_B: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float32]:
        """One vector a row, shape (B, D), float32; what lies beyond a row's length is padding.

        pair_starts_B: where the second text of each row begins, if rows are pairs.
        Raises OutOfMemoryError if the batch does not fit: the engine halves it.
        Raises BackendError, BackendUnavailableError.
        """
        ...

    def device_memory_bytes(self) -> int:
        """Most memory held on the device so far; 0 where the device is the CPU."""
        ...
