"""CSV and TSV: every record a row, and a bad record costs its own line only.

Reading goes on at the line after the first line of a bad record: a quote that is never closed
would otherwise swallow the rest of the file. Cells are text; nothing is inferred from them.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tokenmill.columns import column_given_twice, missing_column
from tokenmill.corpus import kind_suffix
from tokenmill.errors import InputNotFoundError, UnreadableFileError
from tokenmill.job import InputSpec
from tokenmill.lines import iter_lines, strip_bom
from tokenmill.partitions import partition_columns
from tokenmill.rows import (
    SAMPLE_CHARS,
    Cell,
    RowAction,
    RowBuilder,
    TextIs,
    count_blank,
    too_large,
)
from tokenmill.texts import printable_cell

ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that is no text


class _LineTooLongError(Exception):
    """A line beyond the limit, met while a record was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record. line: number of its first line, from 1.  sample: its beginning, if it is bad."""

    line: int
    fields: list[str] = field(default_factory=list)
    reason: str | None = None
    detail: str = ""
    sample: str = ""


def csv_rows(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> Iterator[RowAction]:
    """One action per record after the header, blank lines included.

    Raises InputNotFoundError, UnreadableFileError for a header that cannot be read.
    """
    found = _records(chunks, uri, spec)
    header = spec.csv.columns or _header(found, uri)
    if not header:
        return
    folders = partition_columns(uri, own=header)
    places = _places([*header, *folders], spec, uri)
    of_folders = list(folders.values())
    ordinal = 0
    for record in found:
        if not record.fields and not record.reason:
            yield count_blank
            continue
        yield _row(ordinal, record, len(header), of_folders, places, spec)
        ordinal += 1


def csv_header(chunks: Iterable[bytes], uri: str, spec: InputSpec) -> list[str]:
    """Column names, none for an empty file; those that the job wants are among them.

    Raises InputNotFoundError, ConfigError, UnreadableFileError.
    """
    header = spec.csv.columns or _header(_records(chunks, uri, spec), uri)
    if header:
        _places([*header, *partition_columns(uri, own=header)], spec, uri)
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

    dialect = _dialect(uri, spec)
    reader, number = csv.reader(feed(), dialect), 1
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
            reader = csv.reader(feed(), dialect)
        else:
            yield Record(line=number, fields=fields)
            number += len(taken)


def _dialect(uri: str, spec: InputSpec) -> type[csv.Dialect]:
    asked = spec.csv

    class Asked(csv.Dialect):
        delimiter = asked.delimiter or ("\t" if kind_suffix(uri) == ".tsv" else ",")
        quotechar = asked.quote
        quoting = csv.QUOTE_NONE if asked.quote is None else csv.QUOTE_MINIMAL
        escapechar = asked.escape
        doublequote = True
        lineterminator = "\n"
        strict = True

    return Asked


def _bad(number: int, exc: Exception, taken: list[tuple[bytes, bool]], spec: InputSpec) -> Record:
    """The record of a line that cannot be read, alone or with the lines after it."""
    first, cut = taken[0]
    if cut:
        sample = first[: 4 * SAMPLE_CHARS].decode(spec.encoding, "replace")[:SAMPLE_CHARS]
        return Record(line=number, reason="row_too_large", detail=too_large(spec), sample=sample)
    detail = f"line {number}: {exc}"
    if isinstance(exc, _LineTooLongError):
        detail = f"line {number}: a quote opens, and a line after it is {too_large(spec)}"
    return Record(line=number, reason="bad_csv", detail=detail, sample=first.decode(spec.encoding, "replace"))


def _places(header: list[str], spec: InputSpec, uri: str) -> dict[str, int]:
    """Position of every column that the job wants.  Raises InputNotFoundError, ConfigError."""
    for name in spec.columns:
        if name not in header:
            raise _other_delimiter(header, uri) or missing_column(uri, name, header)
        if header.count(name) > 1:
            raise column_given_twice(uri, name)
    return {name: header.index(name) for name in spec.columns}


def _other_delimiter(header: list[str], uri: str) -> InputNotFoundError | None:
    """The error for a header that looks as if another character separated its columns."""
    for mark in ";\t|,":
        if len(header) == 1 and mark in header[0]:
            return InputNotFoundError(
                f"{uri}: one column {header[0]!r}; if {mark!r} separates columns, set input.csv.delimiter"
            )
    return None


def _row(
    ordinal: int,
    record: Record,
    width: int,
    of_folders: list[str | None],
    places: Mapping[str, int],
    spec: InputSpec,
) -> RowAction:
    """width: fields that a record must have.  of_folders: those that come after them."""
    if record.reason:
        reason, text_is = record.reason, TEXT_IS[record.reason]
        return lambda b: b.reject(ordinal, reason, record.detail, None, record.sample, text_is)
    if len(record.fields) != width:
        detail = f"line {record.line}: {len(record.fields)} fields, the header has {width}"
        line = _as_line(record.fields, spec)
        return lambda b: b.reject(ordinal, "bad_csv", detail, None, line, "line")

    def take(builder: RowBuilder) -> None:
        fields = [*record.fields, *of_folders]
        values = {name: fields[place] for name, place in places.items()}
        carried = [name for name in (spec.id, *spec.keep) if name is not None]
        odd = [name for name in carried if ESCAPED_BYTE.search(values[name] or "")]
        shown = {
            name: _decoded(values[name], spec.encoding) if name in odd else values[name] for name in carried
        }
        row_id = printable_cell(shown[spec.id]) if spec.id else None
        kept = [printable_cell(shown[name]) for name in spec.keep]
        cells = [_cell(values[name], spec.encoding) for name in spec.text_columns]
        if odd and spec.undecodable == "reject":
            detail = f"line {record.line}: column {odd[0]!r}: not {spec.encoding}"
            text = "\n".join(_decoded(values[name], spec.encoding) for name in spec.text_columns)
            known = dict(zip(spec.keep, kept, strict=True))
            builder.reject(ordinal, "undecodable", detail, row_id, text, "text", known)
            return
        before = builder.rows_scrubbed
        if builder.add(ordinal, cells, row_id, kept) and odd:
            builder.chars_replaced += sum(_num_replaced(values[name], shown[name]) for name in odd)
            builder.rows_scrubbed = before + 1

    return take


TEXT_IS: Mapping[str, TextIs] = {"row_too_large": "beginning", "bad_csv": "line"}


def _cell(value: str | None, encoding: str) -> Cell:
    """Text, or bytes where some of them are no text."""
    return value.encode(encoding, "surrogateescape") if value and ESCAPED_BYTE.search(value) else value


def _decoded(value: str | None, encoding: str) -> str:
    return (value or "").encode(encoding, "surrogateescape").decode(encoding, "replace")


def _num_replaced(before: str | None, after: str | None) -> int:
    return (after or "").count("\ufffd") - (before or "").count("\ufffd")


def _as_line(fields: list[str], spec: InputSpec) -> str:
    """A record as a line again, for whoever mends it."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([_decoded(value, spec.encoding) for value in fields])
    return out.getvalue()
