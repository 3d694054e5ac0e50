"""Checks of a file's columns against the job, made while planning, before any work starts."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tokenmill.errors import ConfigError, InputNotFoundError
from tokenmill.job import InputSpec


def missing_column(uri: str, name: str, names: Iterable[str]) -> InputNotFoundError:
    known = ", ".join(list(names)[:20]) or "none"
    return InputNotFoundError(f"{uri}: no column {name!r}; it has: {known}")


def check_parquet_columns(schema: pa.Schema, uri: str, spec: InputSpec) -> dict[str, pa.DataType]:
    """Types of the kept columns.  Raises InputNotFoundError or ConfigError (wrong type)."""
    for name in [spec.text, *([spec.id] if spec.id else []), *spec.keep]:
        if name not in schema.names:
            raise missing_column(uri, name, schema.names)
    text_type = _value_type(schema.field(spec.text).type)
    if not _holds_text(text_type):
        raise ConfigError(
            f"{uri}: input.text: column {spec.text!r} is {text_type}, not text; name a text column"
        )
    if spec.id and pa.types.is_nested(schema.field(spec.id).type):
        raise ConfigError(
            f"{uri}: input.id: column {spec.id!r} is {schema.field(spec.id).type}, not a plain value"
        )
    return {name: _value_type(schema.field(name).type) for name in spec.keep}


def _value_type(dtype: pa.DataType) -> pa.DataType:
    return dtype.value_type if pa.types.is_dictionary(dtype) else dtype


def _holds_text(dtype: pa.DataType) -> bool:
    t = pa.types
    is_string = t.is_string(dtype) or t.is_large_string(dtype) or t.is_string_view(dtype)
    return bool(is_string or t.is_binary(dtype) or t.is_large_binary(dtype) or t.is_null(dtype))
