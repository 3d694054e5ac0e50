"""What a file is by its first bytes, where that is not what its name says. Pure."""

from __future__ import annotations

import codecs

from tokenmill.errors import UnreadableFileError

OTHER_KINDS: dict[bytes, tuple[str, str]] = {
    b"\x1f\x8b\x08": ("gzip data", "end its name in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd data", "end its name in .zst"),
    b"BZh": ("bzip2 data", "pack it as .gz or .zst, or unpack it"),
    b"\xfd7zXZ\x00": ("xz data", "pack it as .gz or .zst, or unpack it"),
    b"\x04\x22\x4d\x18": ("lz4 data", "pack it as .gz or .zst, or unpack it"),
    b"PK\x03\x04": ("a zip archive (perhaps a spreadsheet)", "unpack it, or save it as CSV"),
    b"PAR1": ("Parquet", "end its name in .parquet"),
    b"ARROW1": ("Arrow IPC", "end its name in .arrow"),
    b"Obj\x01": ("Avro", "convert it to Parquet"),
    b"ORC": ("ORC", "convert it to Parquet"),
    b"SQLite format 3\x00": ("a SQLite database", "export its table as CSV"),
    b"%PDF-": ("a PDF", "extract its text first"),
    b"\x89PNG\r\n": ("a picture", "it has no rows"),
    b"\xff\xd8\xff": ("a picture", "it has no rows"),
}
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
SURE = {b"BZh": b"1AY&SY", b"ORC": b"\x08"}  # what follows where the mark alone might begin a text


def check_is_text(head: bytes, uri: str) -> None:
    """Raises UnreadableFileError for bytes that are no lines of text but a file of another kind."""
    for mark, (kind, what_to_do) in OTHER_KINDS.items():
        if head.startswith(mark) and SURE.get(mark, b"") in head[: len(mark) + 10]:
            raise UnreadableFileError(f"{uri}: is {kind}, whatever its name says; {what_to_do}")
    if head.startswith(WIDE_MARKS):
        raise UnreadableFileError(f"{uri}: is text in UTF-16 or UTF-32; convert it: iconv -f UTF-16 -t UTF-8")
