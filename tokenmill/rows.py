"""Rows on their way in: the clean ones as columns and texts, the bad ones as rejects.

Shared by all readers. Knows no file format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from tokenmill.job import InputSpec
from tokenmill.schemas import ROW_KEY
from tokenmill.texts import TextMaker, mend_surrogates, printable

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20
SAMPLE_CHARS = 2000

Cell = str | bytes | None  # bytes: a cell whose bytes may not be text
TextIs = Literal["text", "line", "replaced", "beginning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that could not be processed: where it is, why, and what is needed to mend it.

    text_is: "text", the row's whole text; "line", the whole line it stands on; "replaced", with U+FFFD
    for bytes that are not text; "beginning", cut.  columns: its other columns, as a JSON object.
    """

    source_file: str
    row_ordinal: int
    id: str | None
    stage: str
    reason: str
    detail: str
    text: str | None
    text_is: TextIs | None
    columns: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Consecutive rows of a file: the good ones as columns, the bad ones as rejects.

    columns: source_file, row_ordinal, id and kept columns.  texts: one string a good row.
    pairs: the second text of each good row, where the job has pairs.
    """

    columns: pa.RecordBatch
    texts: list[str]
    rejects: list[Reject]
    pairs: list[str] | None = None
    lines_blank: int = 0
    rows_scrubbed: int = 0
    chars_replaced: int = 0

    @property
    def rows_in(self) -> int:
        return len(self.texts) + len(self.rejects)


def row_columns(keep: Mapping[str, pa.DataType]) -> pa.Schema:
    """Schema of `RowBatch.columns`."""
    return pa.schema([*ROW_KEY, *(pa.field(name, dtype) for name, dtype in keep.items())])


def columns_json(columns: Mapping[str, Any]) -> str | None:
    """A row's columns as a JSON object, whatever their types; None if there are none."""
    if not columns:
        return None
    return printable(plain_json(dict(columns)))


def plain_json(value: Any) -> str:
    """A value as JSON; what JSON has no form for as a string."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@dataclass(slots=True)
class RowBuilder:
    """Collects rows until a batch is full.

    Cells are those of `InputSpec.text_columns`, kept values those of `InputSpec.keep`, in order.
    """

    uri: str
    spec: InputSpec
    ordinals: list[int] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    kept: list[Sequence[str | None]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    lines_blank: int = 0
    rows_scrubbed: int = 0
    chars_replaced: int = 0
    filled_bytes: int = 0
    _names: list[str] = field(init=False)
    _maker: TextMaker = field(init=False)

    def __post_init__(self) -> None:
        self.uri = printable(self.uri)  # a file name need not be UTF-8
        self._names, self._maker = self.spec.text_columns, TextMaker(self.spec)

    def reject(
        self,
        ordinal: int,
        reason: str,
        detail: str,
        row_id: str | None,
        text: str | None,
        text_is: TextIs = "text",
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Note a bad row.  columns: what else is known of it."""
        self.filled_bytes += len(text or "")
        self.rejects.append(
            Reject(
                source_file=self.uri,
                row_ordinal=ordinal,
                id=row_id,
                stage="tokenize",
                reason=reason,
                detail=detail,
                text=None if text is None else printable(text),
                text_is=None if text is None else text_is,
                columns=columns_json(columns or {}),
            )
        )

    def add(
        self,
        ordinal: int,
        cells: Sequence[Cell],
        row_id: str | None = None,
        kept: Sequence[str | None] = (),
        others: Callable[[], Mapping[str, Any]] | None = None,
    ) -> bool:
        """Take one row; whether it is good. A null, a cell that is not text or one too long rejects it.

        others: kept columns of a bad row, where they are not in `kept`.
        """
        replaced = self.chars_replaced
        texts = [self._decoded(cell) for cell in cells]
        if wrong := self._wrong(cells):
            self.chars_replaced = replaced
            reason, detail, text_is = wrong
            known = others() if others else dict(zip(self.spec.keep, kept, strict=True))
            self._reject_row(ordinal, reason, detail, row_id, texts, text_is, known)
            return False
        text, pair = self._maker.make([self._mended(text) for text in texts])
        self.rows_scrubbed += self.chars_replaced > replaced
        self.ordinals.append(ordinal)
        self.ids.append(row_id)
        self.kept.append(kept)
        self.texts.append(text)
        self.pairs.append(pair or "")
        self.filled_bytes += len(text) + len(pair or "") + sum(len(value) for value in kept if value)
        return True

    def _wrong(self, cells: Sequence[Cell]) -> tuple[str, str, TextIs] | None:
        """Reason, detail and what can be shown, of the first thing that is wrong with a row's cells."""
        limit = self.spec.max_row_bytes
        if sum(map(_most_bytes, cells)) > limit and sum(map(_num_bytes, cells)) > limit:
            return "row_too_large", too_large(self.spec), "beginning"
        for name, cell in zip(self._names, cells, strict=True):
            if cell is None and self.spec.nulls == "reject":
                return "null_text", f"column {name!r} is null", "text"
            if isinstance(cell, bytes) and self.spec.undecodable == "reject":
                place = undecodable_at(cell, self.spec.encoding)
                if place is not None:
                    return "undecodable", f"not {self.spec.encoding} at byte {place} of the row", "replaced"
        return None

    def _reject_row(
        self,
        ordinal: int,
        reason: str,
        detail: str,
        row_id: str | None,
        texts: Sequence[str],
        text_is: TextIs,
        known: Mapping[str, Any],
    ) -> None:
        if text_is == "beginning":
            texts = [text[:SAMPLE_CHARS] for text in texts]
        several = dict(zip(self._names, texts, strict=True)) if len(texts) > 1 else {}
        text = None if reason == "null_text" and not several else "\n".join(texts)
        self.reject(ordinal, reason, detail, row_id, text, text_is, {**several, **known})

    def _decoded(self, cell: Cell) -> str:
        """A cell as text; U+FFFD for what is none is counted."""
        if cell is None or isinstance(cell, str):
            return cell or ""
        text = cell.decode(self.spec.encoding, "replace")
        if "\ufffd" in text and undecodable_at(cell, self.spec.encoding) is not None:
            self.chars_replaced += text.count("\ufffd") - cell.count(_mark(self.spec.encoding))
        return text

    def _mended(self, text: str) -> str:
        mended = mend_surrogates(text)
        if mended is not text:
            self.chars_replaced += mended.count("\ufffd") - text.count("\ufffd")
        return mended

    def decode(self, ordinal: int, line: bytes) -> str | None:
        """A whole line as text, or None where it was rejected."""
        place = undecodable_at(line, self.spec.encoding)
        if place is None:
            return line.decode(self.spec.encoding)
        text = line.decode(self.spec.encoding, "replace")
        if self.spec.undecodable == "replace":
            self.count_replaced(text.count("\ufffd"))
            return text
        detail = f"not {self.spec.encoding} at byte {place} of the row"
        self.reject(ordinal, "undecodable", detail, None, text, "replaced")
        return None

    def count_replaced(self, num_chars: int) -> None:
        self.rows_scrubbed += 1
        self.chars_replaced += num_chars

    @property
    def is_full(self) -> bool:
        rows = len(self.texts) + len(self.rejects)
        return rows >= BATCH_ROWS or self.filled_bytes >= BATCH_BYTES

    def build(self) -> RowBatch:
        schema = row_columns(dict.fromkeys(self.spec.keep, pa.string()))
        kept = [[row[place] for row in self.kept] for place in range(len(self.spec.keep))]
        values = [[self.uri] * len(self.texts), self.ordinals, self.ids, *kept]
        arrays = [pa.array(v, f.type) for v, f in zip(values, schema, strict=True)]
        return self.finish(pa.record_batch(arrays, schema=schema))

    def finish(self, columns: pa.RecordBatch) -> RowBatch:
        """The batch, with the columns of its good rows made elsewhere."""
        return RowBatch(
            columns=columns,
            texts=self.texts,
            pairs=self.pairs if self.spec.pair is not None else None,
            rejects=self.rejects,
            lines_blank=self.lines_blank,
            rows_scrubbed=self.rows_scrubbed,
            chars_replaced=self.chars_replaced,
        )


RowAction = Callable[[RowBuilder], object]


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
    sample = beginning[: 4 * SAMPLE_CHARS].decode(spec.encoding, "replace")[:SAMPLE_CHARS]
    return lambda b: b.reject(ordinal, "row_too_large", too_large(spec), row_id, sample, "beginning")


def undecodable_at(raw: bytes, encoding: str) -> int | None:
    """Place of the first byte that is not text, or None."""
    try:
        raw.decode(encoding)
    except UnicodeDecodeError as exc:
        return exc.start
    return None


def _mark(encoding: str) -> bytes:
    """U+FFFD as a file of this encoding holds it itself; what no cell holds where it cannot."""
    try:
        return "\ufffd".encode(encoding)
    except UnicodeEncodeError:
        return b"\n\0\n"


def _most_bytes(cell: Cell) -> int:
    """More than a cell can take as UTF-8, without encoding it."""
    return 4 * len(cell) if isinstance(cell, str) else len(cell or b"")


def _num_bytes(cell: Cell) -> int:
    return len(cell.encode("utf-8", "surrogatepass")) if isinstance(cell, str) else len(cell or b"")


def too_large(spec: InputSpec) -> str:
    return f"longer than input.max_row_bytes = {spec.max_row_bytes}"
