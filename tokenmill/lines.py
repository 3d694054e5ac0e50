"""Bytes to lines: decompression of every frame, and lines that never outgrow a limit."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from typing import IO

import zstandard

from tokenmill.errors import UnreadableFileError

CHUNK_BYTES = 1 << 20
ZSTD_FEED_BYTES = 1 << 14  # a few KiB of zstd may hold hundreds of MiB of zeros
BOM = b"\xef\xbb\xbf"


def decompressed(file: IO[bytes], uri: str, compression: str | None) -> Iterator[bytes]:
    """The file's bytes in chunks, every member and frame of it.  Raises UnreadableFileError."""
    try:
        if compression == "gzip":
            with gzip.open(file, "rb") as stream:
                yield from iter(lambda: stream.read(CHUNK_BYTES), b"")
        elif compression == "zstd":
            yield from _zstd_chunks(file, uri)
        else:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as exc:
        raise UnreadableFileError(f"{uri}: damaged or cut short {compression} data: {exc}") from exc


def _zstd_chunks(file: IO[bytes], uri: str) -> Iterator[bytes]:
    """All frames. Subtle: zstandard's stream reader ends quietly where a frame is cut short."""
    frame = None
    for chunk in _feed(file):
        while chunk:
            if frame is None:
                frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            data = frame.decompress(chunk)
            if data:
                yield data
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, None
    if frame is not None:
        raise UnreadableFileError(f"{uri}: cut short: the last zstd frame is not complete")


def _feed(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(CHUNK_BYTES):
        yield from (block[at : at + ZSTD_FEED_BYTES] for at in range(0, len(block), ZSTD_FEED_BYTES))


def iter_lines(
    chunks: Iterable[bytes], max_bytes: int, keep_cr: bool = False
) -> Iterator[tuple[bytes, bool]]:
    """Lines without their end, cut at LF or CRLF, and whether each was cut off at max_bytes.

    The last line counts whether or not it ends with a newline. No line is held beyond max_bytes.
    keep_cr: leave the CR of a CRLF on the line.
    Example: [b"a\\nb", b"c"] -> (b"a", False), (b"bc", False)
    """
    pieces: list[bytes] = []
    held = 0
    started = False
    for chunk in chunks:
        lines = chunk.split(b"\n")
        for number, line in enumerate(lines):
            if held < max_bytes + 1:
                pieces.append(line[: max_bytes + 1 - held])
            held += len(line)
            started = started or bool(line)
            if number < len(lines) - 1:
                yield _finish_line(pieces, held, max_bytes, keep_cr)
                pieces, held, started = [], 0, False
    if started:
        yield _finish_line(pieces, held, max_bytes, keep_cr)


def _finish_line(pieces: list[bytes], held: int, max_bytes: int, keep_cr: bool) -> tuple[bytes, bool]:
    line = b"".join(pieces)
    if held > max_bytes + 1 or (held == max_bytes + 1 and not line.endswith(b"\r")):
        return line[:max_bytes], True
    return (line if keep_cr else line.removesuffix(b"\r")), False


def strip_bom(line: bytes) -> bytes:
    """Without a byte order mark, which `cat` may also leave in the middle of a file."""
    return line.removeprefix(BOM)
