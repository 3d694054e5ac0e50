"""JSONL: every line an object, and a bad line costs nothing but itself. Values are taken as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from tokenmill.corpus import kind_suffix
from tokenmill.errors import UnreadableFileError
from tokenmill.job import InputSpec
from tokenmill.lines import iter_lines, strip_bom
from tokenmill.partitions import partition_columns
from tokenmill.rows import RowAction, RowBuilder, count_blank, cut_line
from tokenmill.texts import printable_cell


def json_rows(
    chunks: Iterable[bytes], spec: InputSpec, folders: Mapping[str, str | None], first_row: int = 0
) -> Iterator[RowAction]:
    """One action per line, blank lines included.

    folders: values of columns that objects lack.  first_row: ordinal of the first line.
    """
    wanted = spec.columns
    for ordinal, (line, cut) in enumerate(iter_lines(chunks, spec.max_row_bytes), first_row):
        yield _json_row(ordinal, strip_bom(line), cut, spec, wanted, folders)


def json_keys(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> list[str]:
    """Keys of the objects in the first chunk, in order of first appearance.

    Raises UnreadableFileError for a .json file that is one array.
    """
    head = next(iter(chunks), b"")
    if kind_suffix(uri) == ".json" and strip_bom(head).lstrip().startswith(b"["):
        raise UnreadableFileError(
            f"{uri}: a JSON array; rows are read from JSON Lines, one object a line: "
            "jq -c '.[]' FILE.json > FILE.jsonl makes them"
        )
    keys: dict[str, None] = {}
    for line, _ in iter_lines([head], spec.max_row_bytes):
        try:
            keys.update(dict.fromkeys(parse_object(strip_bom(line).decode(spec.encoding))))
        except ValueError:
            continue  # told of when the row is read
    if kind_suffix(uri) == ".json" and head.strip() and not keys:
        raise UnreadableFileError(
            f"{uri}: no line of its beginning is a JSON object; rows are read from JSON Lines, one object a "
            "line: jq -c . FILE.json > FILE.jsonl makes them"
        )
    return [*keys, *partition_columns(uri, own=keys)] if keys else []


def _json_row(
    ordinal: int,
    line: bytes,
    cut: bool,
    spec: InputSpec,
    wanted: list[str],
    folders: Mapping[str, str | None],
) -> RowAction:
    if cut:
        return cut_line(ordinal, line, spec)
    if not line.strip():
        return count_blank

    def take(builder: RowBuilder) -> None:
        text = builder.decode(ordinal, line)
        if text is None:
            return
        try:
            values = {**folders, **_json_values(parse_object(text), text, wanted)}
        except ValueError as exc:
            builder.reject(ordinal, "bad_json", f"line {ordinal + 1}: {exc}", None, text, "line")
            return
        row_id = printable_cell(values.get(spec.id)) if spec.id else None
        kept = [printable_cell(values.get(name)) for name in spec.keep]
        for name in spec.text_columns:
            if name not in values:
                detail = f"line {ordinal + 1}: no key {name!r}"
                known = dict(zip(spec.keep, kept, strict=True))
                builder.reject(ordinal, "missing_text", detail, row_id, text, "line", known)
                return
        builder.add(ordinal, [values[name] for name in spec.text_columns], row_id, kept)

    return take


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object. Accepts lone surrogate escapes and NaN, which strict parsers refuse.

    Raises ValueError.
    """
    try:
        row = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        row = _lenient(text)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    return row


def _lenient(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def _json_values(row: Mapping[str, Any], text: str, wanted: list[str]) -> dict[str, str | None]:
    """The wanted values as text, those that the row has.  Raises ValueError.

    Subtle: orjson rounds integers of more than 64 bits to floats; ids may be that long.
    """
    found = {name: row[name] for name in wanted if name in row}
    for name, value in found.items():
        if not isinstance(value, str):
            exact = _lenient(text)[name] if _may_be_rounded(value) else value
            found[name] = _json_text(exact)
    return found


def _may_be_rounded(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, float) and abs(value) >= 2**63)


def _json_text(value: Any) -> str | None:
    """A JSON value as text: strings as they are, null and NaN as None, all else as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None  # how a missing cell is written by those who write JSON from data frames
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
