"""A wrong column is an error before any work starts, and says what there is."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tokenmill.columns import check_json_keys, check_table_columns, stored_type
from tokenmill.errors import ConfigError, InputNotFoundError
from tokenmill.job import InputSpec

SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "n": pa.int64(),
        "vec": pa.list_(pa.float32()),
        "lang": pa.dictionary(pa.int32(), pa.string()),
        "span": pa.duration("s"),
    }
)


def check(**options) -> dict[str, pa.DataType]:
    return check_table_columns(SCHEMA, "f.parquet", InputSpec(uri="f.parquet", **options))


def test_kept_columns_have_the_type_in_which_they_are_stored() -> None:
    assert check(id="n", keep=["lang", "vec"]) == {"lang": pa.string(), "vec": pa.list_(pa.float32())}


@pytest.mark.parametrize("options", [{"text": "body"}, {"id": "body"}, {"keep": ["body"]}])
def test_a_missing_column_is_named_with_those_that_there_are(options: dict) -> None:
    with pytest.raises(InputNotFoundError, match=r"f\.parquet: no column 'body'; it has: text, n, vec, lang"):
        check(**options)


@pytest.mark.parametrize(("name", "dtype"), [("n", "int64"), ("vec", "list"), ("span", "duration")])
def test_a_text_column_must_hold_text(name: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"input\.text: column '{name}' is {dtype}.*not text"):
        check(text=name)


def test_an_id_must_be_a_plain_value() -> None:
    with pytest.raises(ConfigError, match=r"input\.id: column 'vec' is list.*not a plain value"):
        check(id="vec")


def test_a_kept_column_that_parquet_cannot_hold_is_an_error() -> None:
    union = pa.schema([("text", pa.string()), ("k", pa.dense_union([pa.field("a", pa.int64())]))])
    with pytest.raises(ConfigError, match="Parquet cannot hold column 'k'"):
        check_table_columns(union, "f.arrow", InputSpec(uri="f.arrow", keep=["k"]))


def test_a_name_given_twice_is_an_error() -> None:
    doubled = pa.schema([("text", pa.string()), ("text", pa.int64())])
    with pytest.raises(ConfigError, match="two columns are named 'text'"):
        check_table_columns(doubled, "f.parquet", InputSpec(uri="f.parquet"))


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.int8(), pa.int8()),
        (pa.dictionary(pa.int8(), pa.int64()), pa.int64()),
        (pa.run_end_encoded(pa.int32(), pa.large_string()), pa.string()),
    ],
    ids=str,
)
def test_text_is_stored_as_one_type(dtype: pa.DataType, stored: pa.DataType) -> None:
    assert stored_type(dtype) == stored


def test_a_json_key_that_no_file_has_is_an_error_and_one_that_some_have_is_not() -> None:
    found = {"a.jsonl": ["text", "id"], "b.jsonl": ["text", "lang"], "c.jsonl": []}
    check_json_keys(found, InputSpec(uri="x", id="id", keep=["lang"]))
    with pytest.raises(InputNotFoundError, match=r"a\.jsonl: no column 'langs'; it has: text, id, lang"):
        check_json_keys(found, InputSpec(uri="x", keep=["langs"]))
    check_json_keys({"c.jsonl": []}, InputSpec(uri="x"))
