"""A file that is not what its name says is told of before any work; text that looks alike is read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from outputs import read_one, write_files

from tokenmill.errors import UnreadableFileError
from tokenmill.magic import check_is_text
from tokenmill.testing import make_job, make_run


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), sink)
    return sink.getvalue()


def arrow() -> bytes:
    sink, table = io.BytesIO(), pa.table({"text": ["a"]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


LINE = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(LINE), "gzip data.*in .gz"),
        (zstandard.compress(LINE), "zstd data.*in .zst"),
        (bz2.compress(LINE), "bzip2 data.*unpack it"),
        (lzma.compress(LINE), "xz data.*unpack it"),
        (parquet(), r"Parquet.*in \.parquet"),
        (arrow(), r"Arrow IPC.*in \.arrow"),
        (b"PK\x03\x04\x14\x00", "a zip archive"),
        (LINE.decode().encode("utf-16"), "UTF-16 or UTF-32; convert it"),
        (LINE.decode().encode("utf-32"), "UTF-16 or UTF-32; convert it"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.jsonl.gz"])
def test_another_kind_of_file_is_told_of_while_planning(
    tmp_path: Path, content: bytes, message: str, name: str
) -> None:
    write_files(tmp_path, {name: gzip.compress(content) if name.endswith(".gz") else content})
    with pytest.raises(UnreadableFileError, match=f"{name}: is .*{message}"):
        make_run(make_job(tmp_path)).plan()


@pytest.mark.parametrize("text", ["BZhang is a name", "ORCs and elves", "PAR", "PK", "\ufeffPDF", "Object"])
def test_a_text_that_begins_alike_is_a_text(tmp_path: Path, text: str) -> None:
    check_is_text(text.encode(), "a.txt")
    assert read_one(tmp_path / "a.txt", text).texts == [text.removeprefix("\ufeff")]


def test_a_json_document_over_several_lines_is_told_of(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.json": '{\n  "text": "a"\n}\n'})
    with pytest.raises(UnreadableFileError, match=r"a\.json: no line .* jq -c"):
        make_run(make_job(tmp_path)).plan()
