"""Checks of a file's columns against the job, made while planning, before any work starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from tokenmill.errors import ConfigError, InputNotFoundError
from tokenmill.job import InputSpec
from tokenmill.parquet import can_store
from tokenmill.partitions import partition_columns


def missing_column(uri: str, name: str, names: Iterable[str]) -> InputNotFoundError:
    known = ", ".join(list(names)[:20]) or "none"
    return InputNotFoundError(f"{uri}: no column {name!r}; it has: {known}")


def check_folder_columns(uri: str, spec: InputSpec) -> None:
    """Of plain text.  Raises InputNotFoundError for an id or kept column that no folder holds."""
    known = partition_columns(uri)
    for name in (spec.id, *spec.keep):
        if name is not None and name not in known:
            raise InputNotFoundError(
                f"{uri}: no column {name!r}: plain text has those of its folders (name=value/) only: "
                f"{', '.join(known) or 'none'}"
            )


def check_json_keys(found: Mapping[str, Sequence[str]], spec: InputSpec) -> None:
    """found: by file, the keys at its head.  Raises InputNotFoundError for one that no file has."""
    known = list(dict.fromkeys(key for keys in found.values() for key in keys))
    for name in spec.columns:
        if known and name not in known:
            raise missing_column(next(uri for uri, keys in found.items() if keys), name, known)


def column_given_twice(uri: str, name: str) -> ConfigError:
    return ConfigError(f"{uri}: two columns are named {name!r}; rename one")


def check_table_columns(schema: pa.Schema, uri: str, spec: InputSpec) -> dict[str, pa.DataType]:
    """Types of the kept columns.  Raises InputNotFoundError or ConfigError (wrong type)."""
    for name in partition_columns(uri, own=schema.names):
        schema = schema.append(pa.field(name, pa.string()))
    _check_names(schema.names, uri, spec)
    for name in spec.text_columns:
        dtype = stored_type(schema.field(name).type)
        if spec.messages is None and not _holds_text(dtype):
            raise ConfigError(f"{uri}: input.text: column {name!r} is {dtype}, not text; name a text column")
        if spec.messages is not None and not (_holds_text(dtype) or pa.types.is_list(dtype)):
            raise ConfigError(
                f"{uri}: input.messages: column {name!r} is {dtype}, not a list of messages; name one"
            )
    if spec.id and not _has_text_form(stored_type(schema.field(spec.id).type)):
        raise ConfigError(
            f"{uri}: input.id: column {spec.id!r} is {schema.field(spec.id).type}, not a plain value"
        )
    kept = {name: stored_type(schema.field(name).type) for name in spec.keep}
    for name, dtype in kept.items():
        if not can_store(dtype):
            raise ConfigError(
                f"{uri}: input.keep: Parquet cannot hold column {name!r} ({dtype}); leave it out"
            )
    return kept


def _check_names(names: Sequence[str], uri: str, spec: InputSpec) -> None:
    for name in spec.columns:
        if name not in names:
            raise missing_column(uri, name, names)
        if names.count(name) > 1:
            raise column_given_twice(uri, name)


def _storable(kept: dict[str, pa.DataType], uri: str) -> dict[str, pa.DataType]:
    for name, dtype in kept.items():
        if not can_store(dtype):
            raise ConfigError(
                f"{uri}: input.keep: Parquet cannot hold column {name!r} ({dtype}); leave it out"
            )
    return kept


def stored_type(dtype: pa.DataType) -> pa.DataType:
    """How a kept column is stored: one type for all of Arrow's ways to hold text, or bytes.

    Example: dictionary<string>, run-end encoded string, large_string and string_view -> string
    """
    t = pa.types
    if t.is_dictionary(dtype) or t.is_run_end_encoded(dtype):
        return stored_type(dtype.value_type)
    if t.is_string_view(dtype) or t.is_large_string(dtype):
        return pa.string()
    if t.is_binary_view(dtype) or t.is_large_binary(dtype):
        return pa.binary()
    return dtype


def _has_text_form(dtype: pa.DataType) -> bool:
    try:
        pa.nulls(0, dtype).cast(pa.string())
    except pa.ArrowNotImplementedError:
        return False
    return True


def _holds_text(dtype: pa.DataType) -> bool:
    t = pa.types
    if isinstance(dtype, pa.BaseExtensionType):
        return _holds_text(stored_type(dtype.storage_type))
    return bool(t.is_string(dtype) or t.is_binary(dtype) or t.is_null(dtype))
