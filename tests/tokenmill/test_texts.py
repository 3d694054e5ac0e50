"""From cells to texts: joined, templated, paired, brought into a normal form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from outputs import jsonl, read_one
from pydantic import ValidationError

from tokenmill.job import InputSpec
from tokenmill.texts import TextMaker, mend_surrogates


def spec(**options) -> InputSpec:
    return InputSpec(uri="x", **options)


@pytest.mark.parametrize(
    ("options", "cells", "expected"),
    [
        ({}, ["a"], ("a", None)),
        ({"text": ["t", "b"]}, ["one", "two"], ("one\ntwo", None)),
        ({"text": ["t", "b"], "template": "{b}: {t}{t}"}, ["one", "two"], ("two: oneone", None)),
        ({"template": "{{{text}}} 100%"}, ["a"], ("{a} 100%", None)),
        ({"pair": "p"}, ["a", "b"], ("a", "b")),
        ({"text": ["t", "b"], "pair": "p"}, ["a", "b", "c"], ("a\nb", "c")),
        ({"unicode": "NFC"}, ["a\u0301"], ("\u00e1", None)),
        ({"unicode": "NFD", "pair": "p"}, ["\u00e1", "\u00e1"], ("a\u0301", "a\u0301")),
        ({}, ["{text} \ud83d"], ("{text} \ud83d", None)),
    ],
)
def test_cells_become_a_text(options: dict, cells: list[str], expected: tuple[str, str | None]) -> None:
    assert TextMaker(spec(**options)).make(cells) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": []}, "name at least one column"),
        ({"text": ["a", "a"]}, "each once"),
        ({"text": ["a", "b"], "template": "{a}"}, "must hold each column of text once in braces: a, b"),
        ({"template": "{text!r}"}, "write a column's name alone in braces"),
        ({"template": "{text"}, "expected '}'"),
        ({"messages": "m", "pair": "p"}, "stands in place of text, template and pair"),
        ({"messages": "m", "text": "t"}, "stands in place of text, template and pair"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        spec(**options)


def test_surrogates_that_belong_together_are_paired() -> None:
    assert mend_surrogates("\ud83d\ude00 a \ud800 b") == "😀 a \ufffd b"


def test_a_row_whose_second_column_is_missing_or_null_is_rejected_with_all_it_has(tmp_path: Path) -> None:
    rows = [{"t": "a", "b": "c", "k": 1}, {"t": "a", "b": None, "k": 2}, {"t": "a", "k": 3}]
    batch = read_one(tmp_path / "a.jsonl", jsonl(rows), text=["t", "b"], keep=["k"])
    assert batch.texts == ["a\nc"]
    assert [(r.row_ordinal, r.reason) for r in batch.rejects] == [(1, "null_text"), (2, "missing_text")]
    assert batch.rejects[0].columns == '{"t": "a", "b": "", "k": "2"}'
    assert batch.rejects[1].text_is == "line"
