"""JSONL: a bad line costs nothing but itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outputs import read_one, write_files

from tokenmill.errors import UnreadableFileError
from tokenmill.rows import RowBatch
from tokenmill.testing import make_job, make_run


def reasons(batch: RowBatch) -> list[tuple[int, str]]:
    return [(reject.row_ordinal, reject.reason) for reject in batch.rejects]


def read(tmp_path: Path, *lines: bytes, **options) -> RowBatch:
    return read_one(tmp_path / "a.jsonl", b"\n".join(lines), **options)


def test_good_lines_survive_bad_neighbours(tmp_path: Path) -> None:
    batch = read(
        tmp_path,
        b'{"text": "first"}',
        b"{bad",
        b"",
        b"  ",
        b"[1, 2]",
        b'"text"',
        b'{"other": 1}',
        b'{"text": null}',
        b'{"text": "last"}',
    )
    assert batch.texts == ["first", "last"]
    assert batch.lines_blank == 2
    assert reasons(batch) == [
        (1, "bad_json"),
        (4, "bad_json"),
        (5, "bad_json"),
        (6, "missing_text"),
        (7, "null_text"),
    ]
    assert batch.rejects[0].detail.startswith("line 2: ")
    assert batch.rejects[0].text == "{bad"
    assert batch.rejects[3].detail == "line 7: no key 'text'"


def test_the_last_line_counts_without_a_newline_and_a_cut_one_is_a_reject(tmp_path: Path) -> None:
    line = b'{"text": "a"}'
    assert read(tmp_path, line, line).texts == ["a", "a"]
    for size in range(1, len(line)):
        assert reasons(read(tmp_path, line, line[:size])) == [(1, "bad_json")]


def test_crlf_and_byte_order_marks_at_any_line_start(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    batch = read(tmp_path, bom + b'{"text": "a"}\r', bom + b'{"text": "b"}\r', b"\r")
    assert batch.texts == ["a", "b"]
    assert (batch.rejects, batch.lines_blank) == ([], 1)


def test_a_lone_surrogate_costs_one_character(tmp_path: Path) -> None:
    batch = read(
        tmp_path, rb'{"text": "a \ud800 b"}', rb'{"text": "\ud83d\ude00"}', rb'{"text": "\udc00\ud800"}'
    )
    assert batch.texts == ["a \ufffd b", "\U0001f600", "\ufffd\ufffd"]
    assert (batch.rows_scrubbed, batch.chars_replaced, batch.rejects) == (2, 3, [])


def test_surrogates_in_ids_kept_values_and_keys_are_scrubbed(tmp_path: Path) -> None:
    batch = read(
        tmp_path, rb'{"text": "x", "id": "\ud800", "k": ["\ud800"], "\ud801": 1}', id="id", keep=["k"]
    )
    assert batch.columns["id"].to_pylist() == ["\ufffd"]
    assert batch.columns["k"].to_pylist() == ['["\ufffd"]']


def test_values_of_other_types_are_their_json_text(tmp_path: Path) -> None:
    values = [1, 1.5, True, {"a": [1, "é"]}, [], "NA", "null"]
    batch = read(
        tmp_path, *(json.dumps({"text": v, "id": v, "k": v}).encode() for v in values), id="id", keep=["k"]
    )
    expected = ["1", "1.5", "true", '{"a": [1, "é"]}', "[]", "NA", "null"]
    assert batch.texts == expected
    assert batch.columns["id"].to_pylist() == expected
    assert batch.columns["k"].to_pylist() == expected


def test_integers_of_any_length_are_exact(tmp_path: Path) -> None:
    number = 123456789012345678901234567890
    line = json.dumps({"text": "x", "id": number, "k": {"n": number}}).encode()
    batch = read(tmp_path, line, id="id", keep=["k"])
    assert batch.columns["id"].to_pylist() == [str(number)]
    assert json.loads(batch.columns["k"][0].as_py()) == {"n": number}


@pytest.mark.parametrize("depth", [900, 1100, 100_000])
def test_deep_nesting_costs_at_most_its_own_line(tmp_path: Path, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    batch = read(tmp_path, b'{"text": "a"}', b'{"text": ' + nested + b"}", b'{"text": "c"}')
    assert batch.texts[0] == "a"
    assert batch.texts[-1] == "c"
    assert len(batch.texts) + len(batch.rejects) == 3


def test_nan_is_a_missing_text_and_of_a_key_given_twice_the_last_one_counts(tmp_path: Path) -> None:
    batch = read(tmp_path, b'{"text": NaN}', b'{"text": "a", "text": "b"}', b'{"text": 1e999}')
    assert batch.texts == ["b", "Infinity"]
    assert [(r.row_ordinal, r.reason) for r in batch.rejects] == [(0, "null_text")]


def test_a_line_longer_than_the_limit_is_a_reject(tmp_path: Path) -> None:
    long = json.dumps({"text": "x" * 2000}).encode()
    batch = read(tmp_path, b'{"text": "a"}', long, b'{"text": "c"}', max_row_bytes=1024)
    assert batch.texts == ["a", "c"]
    assert reasons(batch) == [(1, "row_too_large")]


def test_a_line_of_two_megabytes_is_a_row(tmp_path: Path) -> None:
    text = "x" * (2 << 20)
    assert read(tmp_path, json.dumps({"text": text}).encode()).texts == [text]


def test_bytes_that_are_not_utf8_reject_or_replace(tmp_path: Path) -> None:
    line = b'{"text": "a\xff"}'
    assert reasons(read(tmp_path, line)) == [(0, "undecodable")]
    batch = read(tmp_path, line, undecodable="replace")
    assert (batch.texts, batch.chars_replaced) == (["a\ufffd"], 1)


def test_absent_ids_and_kept_values_are_null(tmp_path: Path) -> None:
    batch = read(tmp_path, b'{"text": "x"}', b'{"text": "y", "id": null, "k": null}', id="id", keep=["k"])
    assert batch.columns["id"].to_pylist() == [None, None]
    assert batch.columns["k"].to_pylist() == [None, None]


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf \n"])
def test_a_file_that_is_one_array_is_an_error_that_says_what_to_do(tmp_path: Path, head: bytes) -> None:
    content = head + b'[\n{"text": "a"},\n{"text": "b"}\n]\n'
    write_files(tmp_path, {"a.json": content})
    with pytest.raises(UnreadableFileError, match=r"a\.json: a JSON array; .* jq -c '\.\[\]'"):
        make_run(make_job(tmp_path)).plan()
    (tmp_path / "in" / "a.json").rename(tmp_path / "in" / "a.jsonl")
    assert len(make_run(make_job(tmp_path)).plan().shards) == 1
