"""Rows on their way in: the clean ones as columns and texts, the bad ones as rejects.

Shared by all readers. Knows no file format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tokenmill.job import InputSpec
from tokenmill.schemas import ROW_KEY

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20
SAMPLE_CHARS = 2000
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that could not be processed: where it is, why, and what can be shown of it."""

    source_file: str
    row_ordinal: int
    id: str | None
    stage: str
    reason: str
    detail: str
    text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Consecutive rows of a file: the good ones as columns, the bad ones as rejects.

    columns: source_file, row_ordinal, id and kept columns.  texts: one string a good row.
    """

    columns: pa.RecordBatch
    texts: list[str]
    rejects: list[Reject]
    lines_blank: int = 0
    rows_scrubbed: int = 0
    chars_replaced: int = 0

    @property
    def rows_in(self) -> int:
        return len(self.texts) + len(self.rejects)


def row_columns(keep: Mapping[str, pa.DataType]) -> pa.Schema:
    """Schema of `RowBatch.columns`."""
    return pa.schema([*ROW_KEY, *(pa.field(name, dtype) for name, dtype in keep.items())])


@dataclass(slots=True)
class RowBuilder:
    """Collects rows until a batch is full."""

    uri: str
    spec: InputSpec
    ordinals: list[int] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    kept: list[list[str | None]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    lines_blank: int = 0
    rows_scrubbed: int = 0
    chars_replaced: int = 0
    filled_bytes: int = 0

    def __post_init__(self) -> None:
        self.uri = printable(self.uri)  # a file name need not be UTF-8

    def reject(self, ordinal: int, reason: str, detail: str, row_id: str | None, text: str | None) -> None:
        self.rejects.append(
            Reject(
                source_file=self.uri,
                row_ordinal=ordinal,
                id=row_id,
                stage="tokenize",
                reason=reason,
                detail=detail,
                text=text if text is None else printable(text[:SAMPLE_CHARS]),
            )
        )

    def add(self, ordinal: int, text: str | None, row_id: str | None, kept: list[str | None]) -> None:
        """Take one row whose text may be null or may hold code points that are not text."""
        if text is None and self.spec.nulls == "reject":
            self.reject(ordinal, "null_text", f"column {self.spec.text!r} is null", row_id, None)
            return
        clean = self._scrub(text or "")
        self.ordinals.append(ordinal)
        self.ids.append(row_id)
        self.kept.append(kept)
        self.texts.append(clean)
        self.filled_bytes += len(clean) + sum(len(value) for value in kept if value)

    def add_bytes(self, ordinal: int, raw: bytes) -> None:
        """Take one row of plain text."""
        text = self.decode(ordinal, raw)
        if text is not None:
            self.add(ordinal, text, None, [None] * len(self.spec.keep))

    def decode(self, ordinal: int, raw: bytes, row_id: str | None = None) -> str | None:
        """The text, or None where the row was rejected."""
        try:
            return raw.decode(self.spec.encoding)
        except UnicodeDecodeError as exc:
            text = raw.decode(self.spec.encoding, "replace")
            if self.spec.undecodable == "replace":
                self.count_replaced(text.count("\ufffd"))
                return text
            detail = f"not {self.spec.encoding} at byte {exc.start} of the row"
            self.reject(ordinal, "undecodable", detail, row_id, text)
            return None

    def count_replaced(self, num_chars: int) -> None:
        self.rows_scrubbed += 1
        self.chars_replaced += num_chars

    def _scrub(self, text: str) -> str:
        """Pair up surrogates that belong together; put U+FFFD for each one left over."""
        if not LONE_SURROGATE.search(text):
            return text
        paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        self.count_replaced(paired.count("\ufffd") - text.count("\ufffd"))
        return paired

    @property
    def is_full(self) -> bool:
        rows = len(self.texts) + len(self.rejects)
        return rows >= BATCH_ROWS or self.filled_bytes >= BATCH_BYTES

    def build(self) -> RowBatch:
        schema = row_columns(dict.fromkeys(self.spec.keep, pa.string()))
        kept = [[row[place] for row in self.kept] for place in range(len(self.spec.keep))]
        values = [[self.uri] * len(self.texts), self.ordinals, self.ids, *kept]
        arrays = [pa.array(v, f.type) for v, f in zip(values, schema, strict=True)]
        return RowBatch(
            columns=pa.record_batch(arrays, schema=schema),
            texts=self.texts,
            rejects=self.rejects,
            lines_blank=self.lines_blank,
            rows_scrubbed=self.rows_scrubbed,
            chars_replaced=self.chars_replaced,
        )


RowAction = Callable[[RowBuilder], None]


def in_batches(builder_of: Callable[[], RowBuilder], rows: Iterator[RowAction]) -> Iterator[RowBatch]:
    """Apply each row to the current builder; give a batch whenever one is full, and a last one."""
    builder = builder_of()
    for row in rows:
        row(builder)
        if builder.is_full:
            yield builder.build()
            builder = builder_of()
    yield builder.build()


def count_blank(builder: RowBuilder) -> None:
    """A line without anything on it: no row, but counted."""
    builder.lines_blank += 1


def cut_line(ordinal: int, beginning: bytes, spec: InputSpec, row_id: str | None = None) -> RowAction:
    """The reject of a row that is too long; `beginning` is what was read of it."""
    sample = beginning[: 4 * SAMPLE_CHARS].decode(spec.encoding, "replace")
    return lambda b: b.reject(ordinal, "row_too_large", too_large(spec), row_id, sample)


def is_too_large(text: str, max_bytes: int) -> bool:
    """Whether a text takes more than max_bytes as UTF-8."""
    if len(text) * 4 <= max_bytes:
        return False
    return len(text) > max_bytes or len(text.encode("utf-8", "surrogatepass")) > max_bytes


def too_large(spec: InputSpec) -> str:
    return f"longer than input.max_row_bytes = {spec.max_row_bytes}"


def printable(text: str) -> str:
    return LONE_SURROGATE.sub("\ufffd", text)
