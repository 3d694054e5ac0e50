"""Bytes to lines: every chunking, every compression, no line beyond its limit."""

from __future__ import annotations

import gzip
import io
from itertools import pairwise

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.errors import UnreadableFileError
from tokenmill.lines import decompressed, iter_lines, strip_bom

line_bytes = st.lists(st.sampled_from([b"a", b"bc ", b"\n", b"\r\n", b"\r", b"\xff", b""]), max_size=40)
cuts = st.lists(st.integers(0, 60), max_size=8)


def chunked(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


def naive_lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


@given(line_bytes, cuts)
@example([b"a", b"\r\n", b"b"], [2])
def test_lines_are_those_of_a_plain_split_however_the_bytes_arrive(
    pieces: list[bytes], places: list[int]
) -> None:
    data = b"".join(pieces)
    found = list(iter_lines(chunked(data, places), max_bytes=1000))
    assert found == [(line, False) for line in naive_lines(data)]


@given(line_bytes, cuts, st.integers(1, 5))
def test_long_lines_are_cut_at_the_limit_and_say_so(
    pieces: list[bytes], places: list[int], limit: int
) -> None:
    data = b"".join(pieces)
    expected = [(line[:limit], len(line) > limit) for line in naive_lines(data)]
    assert list(iter_lines(chunked(data, places), max_bytes=limit)) == expected


@given(line_bytes, cuts)
def test_carriage_returns_can_be_kept(pieces: list[bytes], places: list[int]) -> None:
    data = b"".join(pieces)
    found = b"\n".join(line for line, _ in iter_lines(chunked(data, places), 1000, keep_cr=True))
    assert found == data.removesuffix(b"\n")


def test_no_line_is_held_beyond_the_limit() -> None:
    chunks = (b"x" * 1000 for _ in range(1000))
    assert list(iter_lines(chunks, max_bytes=10)) == [(b"x" * 10, True)]


def test_one_byte_order_mark_is_stripped() -> None:
    assert strip_bom(b"\xef\xbb\xbfa") == b"a"
    assert strip_bom(b"a\xef\xbb\xbf") == b"a\xef\xbb\xbf"


TEXT = b"".join(b"line %d of some text\n" % number for number in range(5000))
HALF = len(TEXT) // 2


def compressed(kind: str | None, *parts: bytes) -> bytes:
    """Each part as a member or frame of its own."""
    compress = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress, None: bytes}[kind]
    return b"".join(compress(part) for part in parts)


def read(data: bytes, kind: str | None) -> bytes:
    return b"".join(decompressed(io.BytesIO(data), "some/file", kind))


@pytest.mark.parametrize("kind", ["gzip", "zstd", None])
def test_every_member_and_frame_is_read(kind: str | None) -> None:
    assert read(compressed(kind, TEXT[:HALF], b"", TEXT[HALF:]), kind) == TEXT


@pytest.mark.parametrize("kind", ["gzip", "zstd", None])
def test_an_empty_file_has_no_bytes(kind: str | None) -> None:
    assert read(b"", kind) == b""


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("missing", [1, 4, 9, 100])
def test_data_that_is_cut_short_is_an_error_not_fewer_lines(kind: str, missing: int) -> None:
    data = compressed(kind, TEXT[:HALF], TEXT[HALF:])
    with pytest.raises(UnreadableFileError, match=r"some/file: .*cut short"):
        read(data[:-missing], kind)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_data_of_another_kind_is_an_error(kind: str) -> None:
    with pytest.raises(UnreadableFileError, match="some/file"):
        read(b"this is not compressed at all, whatever its name says", kind)


def test_a_zstd_skippable_frame_is_passed_over() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    assert read(skippable + compressed("zstd", TEXT), "zstd") == TEXT


def test_a_zstd_bomb_arrives_in_small_pieces() -> None:
    zeros = compressed("zstd", b"\0" * (64 << 20)) * 4
    pieces = [len(piece) for piece in decompressed(io.BytesIO(zeros), "some/file", "zstd")]
    assert sum(pieces) == 4 * (64 << 20)
    assert len(pieces) > 1
