"""Cutting and wrapping rows against a naive oracle, and against the tokenizer's own truncation."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import MINILM
from transformers import AutoTokenizer

from tokenmill.cut import wrap_rows
from tokenmill.errors import ModelMismatchError, ModelNotFoundError
from tokenmill.model_files import resolve_model
from tokenmill.settle import Setup
from tokenmill.testing import FakeTokenizer, word_id
from tokenmill.tokenizer import Encoded, TokenizerInfo, load_tokenizer


def info(prefix: list[int], suffix: list[int]) -> TokenizerInfo:
    return TokenizerInfo(
        fingerprint="f",
        prefix_ids=tuple(prefix),
        suffix_ids=tuple(suffix),
        unknown_id=None,
        pad_id=0,
        vocab_size=100,
        max_tokens=None,
    )


def encoded(rows: list[list[int]]) -> Encoded:
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return Encoded(ids=np.array([i for row in rows for i in row], np.int32), offsets_N1=offsets)


specials = st.lists(st.integers(90, 99), max_size=2)


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=8),
    specials,
    specials,
    st.integers(0, 6),
    st.sampled_from(["left", "right"]),
)
def test_rows_are_cut_and_wrapped_as_a_loop_would(
    rows: list[list[int]], prefix: list[int], suffix: list[int], room: int, side: str
) -> None:
    max_tokens = len(prefix) + len(suffix) + room
    cut = wrap_rows(encoded(rows), info(prefix, suffix), max_tokens, side)
    kept = [row[:room] if side == "right" else row[max(len(row) - room, 0) :] for row in rows]
    expected = [[*prefix, *row, *suffix] for row in kept]
    bounds = cut.offsets_N1.tolist()
    assert [cut.ids[a:b].tolist() for a, b in pairwise(bounds)] == expected
    assert cut.num_dropped_N.tolist() == [len(a) - len(b) for a, b in zip(rows, kept, strict=True)]


OFTEN = [
    "",
    " ",
    "a" * 101,
    "naïve café",
    "你好世界",
    "👨‍👩‍👧",
    "[CLS] x [SEP]",
    "\u0301",
    "ไทย",
    "don't",
    "\x00",
    "\ufffd",
]
texts = st.lists(st.one_of(st.sampled_from(OFTEN), st.text(max_size=40)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def fast():
    return AutoTokenizer.from_pretrained(str(resolve_model(MINILM)))


@given(texts, st.integers(3, 20), st.sampled_from(["left", "right"]))
def test_ids_are_those_of_hugging_face_truncating_by_itself(
    minilm: Setup, fast, texts: list[str], max_tokens: int, side: str
) -> None:
    ours = load_tokenizer(resolve_model(MINILM), parse_special_tokens=True)
    cut = wrap_rows(ours.encode(texts), ours.info, max_tokens, side)
    fast.truncation_side = side
    theirs = fast(texts, truncation=True, max_length=max_tokens)["input_ids"]
    bounds = cut.offsets_N1.tolist()
    assert [cut.ids[a:b].tolist() for a, b in pairwise(bounds)] == theirs
    whole = [len(ids) for ids in fast(texts)["input_ids"]]
    assert cut.num_dropped_N.tolist() == [a - len(b) for a, b in zip(whole, theirs, strict=True)]


def test_special_tokens_in_a_text_are_text_unless_the_job_says_otherwise() -> None:
    folder = resolve_model(MINILM)
    plain, parsed = load_tokenizer(folder, False), load_tokenizer(folder, True)
    assert len(parsed.encode(["[SEP]"]).ids) == 1
    assert len(plain.encode(["[SEP]"]).ids) > 1
    assert plain.info.fingerprint != parsed.info.fingerprint
    assert (plain.info.prefix_ids, plain.info.suffix_ids) == ((101,), (102,))


def test_nothing_to_encode_is_no_rows() -> None:
    found = load_tokenizer(resolve_model(MINILM), False).encode([])
    assert (found.ids.tolist(), found.offsets_N1.tolist()) == ([], [0])


def test_a_folder_without_a_tokenizer_is_a_mistake_in_the_job(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"tokenizer .* cannot be loaded: "):
        load_tokenizer(tmp_path, False)


def test_a_tokenizer_without_a_fixed_frame_is_refused(tmp_path: Path) -> None:
    """A template that repeats the text, as none should."""
    folder = tmp_path / "t"
    folder.mkdir()
    shutil.copy(resolve_model(MINILM) / "tokenizer.json", folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"]["single"] = [
        sequence,
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        sequence,
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ModelMismatchError, match="not a fixed prefix and suffix"):
        load_tokenizer(folder, False)


def test_the_fake_tokenizer_keeps_the_contract() -> None:
    fake = FakeTokenizer()
    found = fake.encode(["a b a", "", f"x {'y' * 101}"])
    assert found.offsets_N1.tolist() == [0, 3, 3, 5]
    assert found.ids.tolist() == [word_id("a"), word_id("b"), word_id("a"), word_id("x"), 3]
    assert found.ids.dtype == np.int32
