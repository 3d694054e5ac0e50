"""Generation's whole contract, on one page: prompts in, completions out, a step at a time. No torch here.

Legend: N prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.backend import BackendInfo

FinishReason = Literal["stop", "length", "non_finite"]
Ends = Callable[[Sequence[int]], bool]

MAX_ROWS = 256  # that a generator runs together, whatever its budget
CONTEXT_TOKENS = 8
SPARE_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen, and where a completion ends.

    temperature: 0 takes the likeliest token.  top_k, top_p: only the likeliest tokens, so many or with so
    much of the probability; None: all.  stop_ids: a completion ends with any of these.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop_ids: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids to go on from.  stream: where its random numbers start; greedy prompts have none."""

    ids: npt.NDArray[np.int32]
    stream: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """New token ids, the one that ended them included.  non_finite: the model gave NaN or infinity."""

    ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one call of the model did.

    num_computed, num_padded: real tokens, and all tokens, that went through the model.
    num_new: tokens that were generated.  finished: number of a prompt, and what came of it.
    """

    seconds: float
    num_computed: int
    num_padded: int
    num_new: int
    finished: tuple[tuple[int, Completion], ...] = ()


class Generator(Protocol):
    """A language model on a device. Called from one thread at a time."""

    @property
    def info(self) -> BackendInfo: ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, ends: Ends, max_batch_tokens: int
    ) -> Iterator[Step]:
        """Run prompts together, the longest first; each finishes once.

        ends: whether new ids say all there is to say.  max_batch_tokens: what the rows that run together
        may hold, prompts and completions; a row longer than that runs alone.
        A completion depends on its own prompt and stream only, not on what runs beside it.
        Raises OutOfMemoryError: what was yielded stays good.  Raises BackendError.
        """
        ...

    def in_fp32(self) -> Generator | None:
        """The same model in float32; None if this one is, or if there is no memory for it."""
        ...

    def device_memory_bytes(self) -> int:
        """Most memory held on the device so far; 0 where the device is the CPU."""
        ...


def never(new_ids: Sequence[int]) -> bool:
    """An `Ends` for completions without stop strings."""
    del new_ids
    return False


def stream_number(seed: int, source_file: str, row_ordinal: int, output: int) -> int:
    """Where the random numbers of one completion start: by its row, not by what runs beside it."""
    key = f"{seed}\n{row_ordinal}\n{output}\n{source_file}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(key).digest()[:16], "little")


def random_stream(number: int) -> np.random.Generator:
    """Example: the first numbers of stream 7 are the same in every process and on every machine."""
    return np.random.Generator(np.random.Philox(key=number))


def plan_groups(lengths_N: npt.ArrayLike, max_new_tokens: int) -> list[npt.NDArray[np.int64]]:
    """Prompts that share a cache, the longest first: none needs less than half of the room of another.

    Returns numbers of prompts, each once.  Example: lengths [100, 9, 8], 10 new -> [[0], [1, 2]]
    """
    room_N = np.asarray(lengths_N, dtype=np.int64) + max_new_tokens
    order, groups = np.argsort(-room_N, kind="stable"), []
    while len(order):
        size = int(np.searchsorted(-2 * room_N[order], -room_N[order[0]], side="right"))
        groups.append(order[:size])
        order = order[size:]
    return groups


class Detokenizer:
    """New ids to text, and whether a stop string is in it.

    decode: ids to text; its second argument says whether special tokens are left out.
    """

    def __init__(self, decode: Callable[[Sequence[int], bool], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tail_tokens = max((len(text.encode()) for text in stop), default=0) + SPARE_TOKENS

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the last of the new ids completes a stop string."""
        if not self._stop:
            return False
        tail = self._decode(ids[-self._tail_tokens :], False)
        return any(text in tail for text in self._stop)

    def text(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """The text of a completion, up to the first stop string; special tokens are left out.

        Subtle: many decoders drop the space before the first token, so the prompt's end is decoded with it.
        """
        context = list(prompt_ids[-CONTEXT_TOKENS:])
        before, whole = (self._decode(part, True) for part in (context, [*context, *ids]))
        text = whole[len(before) :] if whole.startswith(before) else self._decode(ids, True)
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text
