"""Characters that a tokenizer's normaliser takes out of a text without a trace, counted.

Each character is tried once, between two letters; what is gone there counts wherever it stands. So
control characters count, accents that are stripped count, and a space that becomes another one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_CODE_POINTS = 0x110000
UNTRIED, KEPT, REMOVED = range(3)


class RemovedCharacters:
    """Counts them by a table of code points that fills as they are met."""

    def __init__(self, normalizer: Any | None) -> None:
        self._normalizer = normalizer
        self._fate = np.full(NUM_CODE_POINTS if normalizer else 0, UNTRIED, dtype=np.uint8)

    def count(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Removed characters of each text, shape (N,).

        Example: BERT's normaliser and ["a\\0b", "é"] -> [1, 0]
        """
        if self._normalizer is None or not texts:
            return np.zeros(len(texts), dtype=np.int64)
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        for code in np.unique(codes[self._fate[codes] == UNTRIED]):
            self._fate[code] = self._try(chr(code))
        ends = np.cumsum([len(text) for text in texts])
        removed = np.concatenate(([0], np.cumsum(self._fate[codes] == REMOVED)))
        return np.diff(removed[np.concatenate(([0], ends))])

    def _try(self, char: str) -> int:
        assert self._normalizer is not None
        if "\ud800" <= char <= "\udfff":
            return KEPT
        without, between = (self._normalizer.normalize_str(text) for text in ("aa", f"a{char}a"))
        return REMOVED if without == between else KEPT
