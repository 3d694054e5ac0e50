"""CSV and TSV: every record a row, and a bad record costs its own line only.

Reading goes on at the line after the first line of a bad record: a quote that is never closed
would otherwise swallow the rest of the file. Cells are text; nothing is inferred from them.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenmill.columns import column_given_twice, missing_column
from tokenmill.corpus import kind_suffix
from tokenmill.errors import UnreadableFileError
from tokenmill.job import InputSpec
from tokenmill.lines import iter_lines, strip_bom
from tokenmill.rows import (
    SAMPLE_CHARS,
    RowAction,
    RowBuilder,
    count_blank,
    is_too_large,
    printable,
    too_large,
)

ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that is no text


class _LineTooLongError(Exception):
    """A line beyond the limit, met while a record was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record. line: number of its first line, from 1.  sample: its beginning, if it is bad."""

    line: int
    fields: list[str]
    reason: str | None = None
    detail: str = ""
    sample: str = ""


def csv_rows(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> Iterator[RowAction]:
    """One action per record after the header, blank lines included.

    Raises InputNotFoundError, UnreadableFileError for a header that cannot be read.
    """
    found = _records(chunks, uri, spec)
    header = _header(found, uri)
    if not header:
        return
    places = _places(header, spec, uri)
    ordinal = 0
    for record in found:
        if not record.fields and not record.reason:
            yield count_blank
            continue
        yield _row(ordinal, record, len(header), places, spec)
        ordinal += 1


def csv_header(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> list[str]:
    """Column names, none for an empty file; those that the job wants are among them.

    Raises InputNotFoundError, ConfigError, UnreadableFileError.
    """
    header = _header(_records(chunks, uri, spec), uri)
    if header:
        _places(header, spec, uri)
    return header


def _header(records: Iterator[Record], uri: str) -> list[str]:
    header = next((record for record in records if record.fields or record.reason), None)
    if header is not None and header.reason:
        raise UnreadableFileError(f"{uri}: the header cannot be read: {header.detail}; is it a CSV file?")
    return header.fields if header else []


def _records(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> Iterator[Record]:
    """Records with their fields; no fields for a blank line."""
    csv.field_size_limit(max(spec.max_row_bytes, csv.field_size_limit()))
    lines = iter_lines(chunks, spec.max_row_bytes, keep_cr=True)
    given_back: deque[tuple[bytes, bool]] = deque()
    taken: list[tuple[bytes, bool]] = []

    def feed() -> Iterator[str]:
        while (line := given_back.popleft() if given_back else next(lines, None)) is not None:
            raw, cut = line
            taken.append(line)
            if cut:
                raise _LineTooLongError
            yield (strip_bom(raw) if len(taken) == 1 else raw).decode(spec.encoding, "surrogateescape") + "\n"

    delimiter = "\t" if kind_suffix(uri) == ".tsv" else ","
    reader, number = csv.reader(feed(), delimiter=delimiter, strict=True), 1
    while True:
        taken.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except (csv.Error, _LineTooLongError) as exc:
            yield _bad(number, exc, taken, spec)
            given_back.extendleft(reversed(taken[1:]))
            number += 1
            reader = csv.reader(feed(), delimiter=delimiter, strict=True)
        else:
            yield Record(line=number, fields=fields)
            number += len(taken)


def _bad(number: int, exc: Exception, taken: list[tuple[bytes, bool]], spec: InputSpec) -> Record:
    """The record of a line that cannot be read, alone or with the lines after it."""
    first, cut = taken[0]
    reason, detail = ("row_too_large", too_large(spec)) if cut else ("bad_csv", f"line {number}: {exc}")
    if not cut and isinstance(exc, _LineTooLongError):
        detail = f"line {number}: a quote opens, and a line after it is {too_large(spec)}"
    sample = first[: 4 * SAMPLE_CHARS].decode(spec.encoding, "replace")
    return Record(line=number, fields=[], reason=reason, detail=detail, sample=sample)


def _places(header: list[str], spec: InputSpec, uri: str) -> list[int]:
    """Positions of the text, the id if there is one, and the kept columns.

    Raises InputNotFoundError, ConfigError.
    """
    wanted = [spec.text, *([spec.id] if spec.id else []), *spec.keep]
    for name in wanted:
        if name not in header:
            raise missing_column(uri, name, header)
        if header.count(name) > 1:
            raise column_given_twice(uri, name)
    return [header.index(name) for name in wanted]


def _row(ordinal: int, record: Record, width: int, places: list[int], spec: InputSpec) -> RowAction:
    if record.reason:
        reason = record.reason
        return lambda b: b.reject(ordinal, reason, record.detail, None, record.sample)
    if len(record.fields) != width:
        detail = f"line {record.line}: {len(record.fields)} fields, the header has {width}"
        return lambda b: b.reject(ordinal, "bad_csv", detail, None, ",".join(record.fields))

    def take(builder: RowBuilder) -> None:
        values = [record.fields[place] for place in places]
        if ESCAPED_BYTE.search("".join(values)):
            decoded = [_decoded(value, spec.encoding) for value in values]
            if spec.undecodable == "reject":
                detail = f"line {record.line}: not {spec.encoding}"
                row_id = printable(decoded[1]) if spec.id else None
                builder.reject(ordinal, "undecodable", detail, row_id, decoded[0])
                return
            builder.count_replaced(_num_replaced(decoded) - _num_replaced(values))
            values = decoded
        text = values[0]
        row_id, kept = (values[1], values[2:]) if spec.id else (None, values[1:])
        row_id = row_id if row_id is None else printable(row_id)
        if is_too_large(text, spec.max_row_bytes):
            builder.reject(ordinal, "row_too_large", too_large(spec), row_id, text)
            return
        builder.add(ordinal, text, row_id, [printable(value) for value in kept])

    return take


def _decoded(value: str, encoding: str) -> str:
    return value.encode(encoding, "surrogateescape").decode(encoding, "replace")


def _num_replaced(values: list[str]) -> int:
    return sum(value.count("\ufffd") for value in values)
