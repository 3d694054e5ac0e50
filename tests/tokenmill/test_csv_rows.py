"""CSV: cells are text, quotes may span lines, and a bad record costs its own line only."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import new_folder, read_one

from tokenmill.errors import ConfigError, InputNotFoundError, UnreadableFileError
from tokenmill.rows import RowBatch


def reasons(batch: RowBatch) -> list[tuple[int, str, str]]:
    return [(reject.row_ordinal, reject.reason, reject.detail) for reject in batch.rejects]


def read(tmp_path: Path, content: bytes | str, name: str = "a.csv", **options) -> RowBatch:
    return read_one(tmp_path / name, content, **options)


def test_words_that_look_like_nothing_stay_text(tmp_path: Path) -> None:
    batch = read(tmp_path, "text,k\nNA,NA\nnull,null\nNone,\nnan,NaN\n,x\n", keep=["k"])
    assert batch.texts == ["NA", "null", "None", "nan", ""]
    assert batch.columns["k"].to_pylist() == ["NA", "null", "", "NaN", "x"]


def test_quoted_newlines_and_quotes_are_part_of_the_cell(tmp_path: Path) -> None:
    batch = read(tmp_path, b'id,text\r\n1,"a\r\nb"\r\n2,"say ""hi"", ok"\r\n3,"\n"\n', id="id")
    assert batch.texts == ["a\r\nb", 'say "hi", ok', "\n"]
    assert batch.columns["id"].to_pylist() == ["1", "2", "3"]


def test_many_quoted_newlines_across_chunks(tmp_path: Path) -> None:
    content = "id,text\n" + "".join(f'{n},"a\nb{n}"\n' for n in range(60_000))
    batch = read(tmp_path, content)
    assert len(batch.texts) == 60_000
    assert batch.texts[-1] == "a\nb59999"


def test_ragged_rows_are_rejects_that_name_their_line(tmp_path: Path) -> None:
    batch = read(tmp_path, 'a,text\n1,"x\ny"\n2\n3,z,4\n5,ok\n')
    assert batch.texts == ["x\ny", "ok"]
    assert reasons(batch) == [
        (1, "bad_csv", "line 4: 1 fields, the header has 2"),
        (2, "bad_csv", "line 5: 3 fields, the header has 2"),
    ]


def test_an_unclosed_quote_costs_one_line_not_the_rest_of_the_file(tmp_path: Path) -> None:
    batch = read(tmp_path, 'id,text\n1,"abc\n2,def\n3,ghi\n')
    assert batch.texts == ["def", "ghi"]
    assert reasons(batch) == [(0, "bad_csv", "line 2: unexpected end of data")]
    assert batch.rejects[0].text == '1,"abc'


def test_a_stray_quote_costs_one_line(tmp_path: Path) -> None:
    batch = read(tmp_path, 'id,text\n1,"abc"x\n2,def\n3,a"b\n4,"l1\nl2"y\n5,end\n')
    assert batch.texts == ["def", 'a"b', "end"]
    assert [ordinal for ordinal, _, _ in reasons(batch)] == [0, 3, 4]


def test_blank_lines_are_counted_and_may_come_before_the_header(tmp_path: Path) -> None:
    batch = read(tmp_path, "\n\r\ntext,k\n\na,1\n\n")
    assert (batch.texts, batch.lines_blank, batch.rejects) == (["a"], 2, [])


@pytest.mark.parametrize("content", [b"", b"\n\n", b"text\n", b"text", b"\xef\xbb\xbftext,k\r\n"])
def test_a_file_without_records_has_no_rows(tmp_path: Path, content: bytes) -> None:
    batch = read(tmp_path, content)
    assert (batch.texts, batch.rejects) == ([], [])


def test_byte_order_marks_at_the_header_and_at_later_records(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    batch = read(tmp_path, bom + b"text,k\na,1\n" + bom + b'"b",2\n')
    assert batch.texts == ["a", "b"]


def test_a_missing_column_names_what_there_is(tmp_path: Path) -> None:
    for options in ({"text": "body"}, {"text": "a", "id": "body"}, {"text": "a", "keep": ["body"]}):
        with pytest.raises(InputNotFoundError, match=r"a\.csv: no column 'body'; it has: a, b"):
            read(tmp_path, "a,b\n1,2\n", **options)


def test_a_column_given_twice_is_an_error_not_the_first_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.csv: two columns are named 'text'"):
        read(tmp_path, "text,text\n1,2\n")


def test_a_header_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"a\.csv: the header cannot be read"):
        read(tmp_path, 'a,"text\n1,2\n')


@pytest.mark.parametrize("name", ["a.tsv", "a.TSV"])
def test_tabs_separate_in_tsv_files(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, "text\tk\na,b\t2\n", name).texts == ["a,b"]


def test_commas_separate_in_csv_files_whatever_their_folder_is_called(tmp_path: Path) -> None:
    assert read(tmp_path / "x.tsv.files", "text,k\na,b\n").texts == ["a"]


@pytest.mark.parametrize("encoding", ["utf-8", "gbk", "shift_jis", "latin-1", "cp1252"])
def test_cells_that_are_not_text_reject_or_replace(tmp_path: Path, encoding: str) -> None:
    bad = {"utf-8": b"\xff", "gbk": b"\xff", "shift_jis": b"\xa0", "latin-1": None, "cp1252": b"\x81"}[
        encoding
    ]
    content = b"text,k\ngood,1\n" + (b"b" + bad + b"d,1\ngood," + bad + b"\n" if bad else b"")
    batch = read(tmp_path, content, keep=["k"], encoding=encoding)
    assert batch.texts == ["good"]
    assert [(r.row_ordinal, r.reason) for r in batch.rejects] == (
        [(1, "undecodable"), (2, "undecodable")] if bad else []
    )
    if bad:
        replaced = read(tmp_path, content, keep=["k"], encoding=encoding, undecodable="replace")
        assert replaced.texts == ["good", "b\ufffdd", "good"]
        assert replaced.columns["k"].to_pylist() == ["1", "1", "\ufffd"]
        assert (replaced.rows_scrubbed, replaced.chars_replaced) == (2, 2)


def test_undecodable_bytes_in_columns_nobody_asked_for_do_no_harm(tmp_path: Path) -> None:
    assert read(tmp_path, b"text,junk\na,\xff\n").texts == ["a"]


def test_a_line_longer_than_the_limit_costs_itself(tmp_path: Path) -> None:
    long = "x" * 3000
    batch = read(tmp_path, f'id,text\n1,a\n2,{long}\n3,c\n4,"open\n{long}\n5,e\n', max_row_bytes=1024)
    assert batch.texts == ["a", "c", "e"]
    assert [(r.row_ordinal, r.reason) for r in batch.rejects] == [
        (1, "row_too_large"),
        (3, "bad_csv"),
        (4, "row_too_large"),
    ]


def test_nul_bytes_are_characters(tmp_path: Path) -> None:
    assert read(tmp_path, b"text,k\na\0b,1\n").texts == ["a\0b"]


cells = st.text(st.sampled_from('ab",\n\r é😀'), max_size=6)


@given(st.lists(st.tuples(cells, cells), max_size=12))
def test_what_pythons_writer_writes_comes_back(rows: list[tuple[str, str]]) -> None:
    sink = io.StringIO()
    writer = csv.writer(sink, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    writer.writerows([("text", "k"), *rows])
    with new_folder() as folder:
        batch = read(folder, sink.getvalue().encode(), keep=["k"])
    assert batch.rejects == []
    assert list(zip(batch.texts, batch.columns["k"].to_pylist(), strict=True)) == rows


@given(
    st.lists(st.sampled_from(["a,b", '"a,b', 'a,"b"', '"x"y,z', "", "a", '"', 'a,b"', '","']), max_size=25)
)
def test_every_line_ends_up_in_a_row_a_reject_or_the_blank_count(lines: list[str]) -> None:
    with new_folder() as folder:
        batch = read(folder, "\n".join(["text,k", *lines, ""]), keep=["k"])
    kept = batch.columns["k"].to_pylist()
    good = [1 + (text + k).count("\n") for text, k in zip(batch.texts, kept, strict=True)]
    bad = [1 + (reject.text or "").count("\n") for reject in batch.rejects]
    assert sum(good) + sum(bad) + batch.lines_blank == len(lines)
    numbers = [*batch.columns["row_ordinal"].to_pylist(), *(reject.row_ordinal for reject in batch.rejects)]
    assert sorted(numbers) == list(range(len(good) + len(bad)))


@pytest.mark.parametrize(
    ("content", "dialect", "texts"),
    [
        ("id;text\n1;a,b\n", {"delimiter": ";"}, ["a,b"]),
        ("id|text\n1|'a|b'\n", {"delimiter": "|", "quote": "'"}, ["a|b"]),
        ('id,text\n1,say "hi"\n', {"quote": None}, ['say "hi"']),
        ('id,text\n1,"say \\"hi\\", ok"\n', {"escape": "\\"}, ['say "hi", ok']),
        ("1,NA\n2,b\n", {"columns": ["id", "text"]}, ["NA", "b"]),
    ],
)
def test_a_dialect_is_read_as_it_is_told(
    tmp_path: Path, content: str, dialect: dict, texts: list[str]
) -> None:
    assert read(tmp_path, content, csv=dialect).texts == texts


def test_a_header_that_holds_other_delimiters_says_which_option_to_set(tmp_path: Path) -> None:
    with pytest.raises(InputNotFoundError, match=r"input\.csv\.delimiter"):
        read(tmp_path, "id;text\n1;a\n")
