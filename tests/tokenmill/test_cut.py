"""Pairs are cut as Hugging Face tokenizers cut them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import MINILM

from tokenmill.cut import share_room, wrap_pairs
from tokenmill.model_files import resolve_model
from tokenmill.tokenizer import load_tokenizer


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_no_token_of_the_room_is_wasted_and_the_shorter_text_suffers_last(a: int, b: int, room: int) -> None:
    first, second = (int(kept[0]) for kept in share_room(np.array([a]), np.array([b]), room))
    assert 0 <= first <= a
    assert 0 <= second <= b
    assert first + second == min(a + b, room)
    if a + b > room:
        assert abs(first - second) <= 1 or (first == a < second) or (second == b < first)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_tokens", [4, 5, 8, 9, 13, 64])
def test_pairs_are_as_the_tokenizer_makes_and_cuts_them(side: str, max_tokens: int) -> None:
    ours = load_tokenizer(resolve_model(MINILM), parse_special_tokens=False)
    firsts = ["", "one", "one two three", "a b c d e f g h i j", "one two", "x y z"]
    seconds = ["two", "", "four five six", "k", "a b c d e f g h i", "p q r"]
    assert ours.info.pair is not None
    cut = wrap_pairs(ours.encode(firsts), ours.encode(seconds), ours.info.pair, max_tokens, side)
    backend = type(ours._backend).from_str(ours._backend.to_str())
    backend.enable_truncation(max_tokens, strategy="longest_first", direction=side)
    expected = backend.encode_batch(list(zip(firsts, seconds, strict=True)))
    rows = [cut.ids[a:b].tolist() for a, b in pairwise(cut.offsets_N1.tolist())]
    assert rows == [row.ids for row in expected]
    assert cut.pair_starts_N is not None
    second_type = ours.info.pair.second_type
    types = [
        [0] * start + [second_type] * (len(ids) - start)
        for ids, start in zip(rows, cut.pair_starts_N.tolist(), strict=True)
    ]
    assert types == [row.type_ids for row in expected]
