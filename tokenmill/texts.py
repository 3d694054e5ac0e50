"""From the cells of a row to the text that is tokenized: joined, paired, put into a normal form. Pure."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

from tokenmill.job import InputSpec

LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def printable(text: str) -> str:
    """Without lone surrogates, which no file can hold."""
    return LONE_SURROGATE.sub("\ufffd", text)


def printable_cell(text: str | None) -> str | None:
    """`printable`, for a cell that may be null."""
    return None if text is None else printable(text)


def mend_surrogates(text: str) -> str:
    """Pair up surrogates that belong together; U+FFFD for each one left over.

    Example: "\\ud83d\\ude00" -> "😀";  "a \\ud800 b" -> "a \\ufffd b"
    """
    if not LONE_SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextMaker:
    """Makes a row's text, and its second text where the job wants pairs.

    Example: text [a, b], template "{b}: {a}", cells ["x", "y"] -> ("y: x", None)
    """

    def __init__(self, spec: InputSpec) -> None:
        self._has_pair = spec.pair is not None
        # Subtle: a JSON text must stay one; messages are brought into a normal form when rendered.
        self._form = spec.unicode if spec.messages is None else None
        columns = spec.text_columns[:-1] if self._has_pair else spec.text_columns
        self._parts = _parts(spec.template, columns) if spec.template is not None else None

    def make(self, cells: Sequence[str]) -> tuple[str, str | None]:
        """cells: of `InputSpec.text_columns`, in order."""
        first = cells[:-1] if self._has_pair else cells
        if self._parts is not None:
            text = "".join(literal if place is None else first[place] for literal, place in self._parts)
        else:
            text = first[0] if len(first) == 1 else "\n".join(first)
        return self._normal(text), self._normal(cells[-1]) if self._has_pair else None

    def _normal(self, text: str) -> str:
        return text if self._form is None else unicodedata.normalize(self._form, text)


def _parts(template: str, columns: Sequence[str]) -> list[tuple[str, int | None]]:
    """Literals and places of columns, in order."""
    parts: list[tuple[str, int | None]] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append((literal, None))
        if name is not None:
            parts.append(("", columns.index(name)))
    return parts
