"""Columns that folders hold are columns like any other, always text."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest
from outputs import published, run_fake, write_files

from tokenmill.errors import InputNotFoundError
from tokenmill.partitions import NULL, partition_columns
from tokenmill.testing import make_job, make_run


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://b/year=2020/city=A%20b/a.parquet", {"year": "2020", "city": "A b"}),
        ("/in/x=a%2520b/a.csv", {"x": "a%20b"}),
        ("/in/x=a=b/a.csv", {"x": "a=b"}),
        ("/in/x=__HIVE_DEFAULT_PARTITION__/a.csv", {"x": None}),
        ("/in/x=/a.csv", {"x": ""}),
        ("/in/=x/name=a.csv", {}),
    ],
)
def test_values_are_decoded_once(uri: str, expected: dict) -> None:
    assert partition_columns(uri) == expected


FILES = {
    "parquet": pa.table({"text": ["a"], "n": [1]}),
    "jsonl": '{"text": "a", "n": 1}\n',
    "csv": "text,n\na,1\n",
}
PLAIN = {"txt": "a\n", "txt.gz": gzip.compress(b"a\n")}


@pytest.mark.parametrize("kind", [*FILES, *PLAIN])
def test_every_format_has_them(tmp_path: Path, kind: str) -> None:
    content = {**FILES, **PLAIN}[kind]
    write_files(
        tmp_path,
        {
            f"_year=007/lang=A%20b/a.{kind}": content,
            f"_year=2020/lang=de/a.{kind}": content,
            f"_year=2020/lang=de/_hidden.{kind}": content,
            f"_year={NULL}/lang={NULL}/a.{kind}": content,
        },
    )
    job = make_job(tmp_path, input={"id": "_year", "keep": ["lang"]})
    run = make_run(job)
    assert dict(run.plan().skipped) == {"hidden (name begins with . or _)": 1}
    run_fake(job)
    assert [(row["id"], row["lang"]) for row in published(job)] == [
        ("007", "A b"),
        ("2020", "de"),
        (None, None),
    ]


@pytest.mark.parametrize("kind", FILES)
def test_a_column_of_the_file_itself_wins(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, {f"n=other/a.{kind}": FILES[kind]})
    job = make_job(tmp_path, input={"id": "n"})
    run_fake(job)
    assert [row["id"] for row in published(job)] == ["1"]


@pytest.mark.parametrize("kind", FILES)
def test_a_missing_column_names_those_of_folders_too(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, {f"year=1/a.{kind}": FILES[kind]})
    with pytest.raises(InputNotFoundError, match=r"no column 'years'; it has: text, n, year"):
        make_run(make_job(tmp_path, input={"keep": ["years"]})).plan()


def test_plain_text_has_the_columns_of_its_folders_only(tmp_path: Path) -> None:
    write_files(tmp_path, {"lang=de/a.txt": "a"})
    with pytest.raises(InputNotFoundError, match=r"a\.txt: no column 'n': plain text .* only: lang"):
        make_run(make_job(tmp_path, input={"keep": ["n"]})).plan()
