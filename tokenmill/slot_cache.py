"""Keys and values of rows that run together, in slots that a finished row leaves to a waiting one.

All rows end at the same column, whatever their lengths: the next token of every row goes into one column,
and a row's place among the columns is its own affair.

    column    0 1 2 3 4 5 6 7 | 8 9
    row 0       a b c d e f g |          starts at 1
    row 1             x y z w |          starts at 4

Legend: R rows, H heads, C columns, D width of a head, L longest prompt, N rows that enter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, (R, H, C, D) each, of which a range of columns is seen."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.rows, self.first, self.end = len(keys), 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        del key_states, value_states
        raise AssertionError("slots are made at once")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put one more token's into the next column; all that is seen."""
        del args, kwargs
        self.keys[: self.rows, :, self.end] = key_states[:, :, 0]
        self.values[: self.rows, :, self.end] = value_states[:, :, 0]
        seen = slice(self.first, self.end + 1)
        return self.keys[: self.rows, :, seen], self.values[: self.rows, :, seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.end - self.first

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """The layers of `max_rows` rows, with room for `columns` tokens each.

    prefilled: keys and values of any prompts, for the shapes.
    """

    def __init__(self, prefilled: DynamicCache, max_rows: int, columns: int) -> None:
        layers = [
            _SlotLayer(*(_slots(states, max_rows, columns) for states in (layer.keys, layer.values)))
            for layer in prefilled.layers
        ]
        super().__init__(layers=layers)

    def look(self, rows: int, first: int, end: int) -> None:
        """What the next call of the model sees: so many rows, columns from `first` to before `end`."""
        for layer in self.layers:
            layer.rows, layer.first, layer.end = rows, first, end

    def enter(self, prefilled: DynamicCache, rows_N: Tensor, lengths_N: Tensor, end: int) -> None:
        """Copy right-padded prompts into slots, so that they end at a column."""
        longest = int(lengths_N.max())
        back_NL = torch.arange(longest, device=lengths_N.device) - (longest - lengths_N)[:, None]
        from_NL = back_NL.clamp(min=0)
        for layer, own in zip(self.layers, prefilled.layers, strict=True):
            for slots, states in ((layer.keys, own.keys), (layer.values, own.values)):
                index = from_NL[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                slots[rows_N, :, end - longest : end] = states.gather(2, index)

    def keep(self, rows: Tensor, first: int, end: int) -> None:
        """Only these rows, from the top, in the columns from `first` to before `end`."""
        for states in self._states():
            states[: len(rows), :, first:end] = states[rows, :, first:end]

    def move_to_the_left(self, rows: int, first: int, end: int) -> None:
        """Make room: the columns from `first` to before `end` become the first ones."""
        for states in self._states():
            states[:rows, :, : end - first] = states[:rows, :, first:end].clone()

    def clear(self, row: int) -> None:
        """Subtle: what is masked is multiplied by zero, and zero times NaN is NaN."""
        for states in self._states():
            states[row] = 0

    def _states(self) -> list[Tensor]:
        return [states for layer in self.layers for states in (layer.keys, layer.values)]


def _slots(states: Tensor, max_rows: int, columns: int) -> Tensor:
    """Subtle: zeros, not whatever memory holds, which may be NaN."""
    _, heads, _, width = states.shape
    return states.new_zeros((max_rows, heads, columns, width))
