"""Special tokens around token ids, and rows cut to a length, every dropped token counted. Pure numpy.

Legend: N rows; K kept tokens of a row; T texts, where one text may be several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenmill.tokenizer import Encoded, Int32s, PairTemplate, TokenizerInfo

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Ragged ids with special tokens, ready for the model, and what was dropped of each row.

    pair_starts_N: place in its row of the second text's first token, where rows are pairs.
    chunks: which text each row is a part of, where texts are cut into several.
    """

    ids: Int32s
    offsets_N1: Int64s
    num_dropped_N: Int32s
    pair_starts_N: Int32s | None = None
    chunks: Chunks | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Rows that are parts of texts: of which, the how-manieth part, and the place of its first new token.

    A new token is one that the part before does not have; of the first part all are.
    """

    text_N: Int64s
    index_N: Int32s
    first_new_N: Int32s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A stretch of every row: source[start : start + length]."""

    source: Int32s
    starts_N: Int64s
    lengths_N: Int64s


def wrap_rows(encoded: Encoded, info: TokenizerInfo, max_tokens: int, side: str) -> Cut:
    """Cut each row to max_tokens, special tokens included, and put those around it.

    side: "right" drops the end of a row, "left" its beginning.  max_tokens >= info.num_special.
    Example: [CLS] [SEP] around ids 1..5 with max_tokens 4, right -> [CLS] 1 2 [SEP], 3 dropped
    """
    lengths_N = np.diff(encoded.offsets_N1)
    kept_N = np.minimum(lengths_N, max_tokens - info.num_special)
    rows = len(lengths_N)
    ids, offsets = _joined(
        [_same(info.prefix_ids, rows), _part(encoded, kept_N, side), _same(info.suffix_ids, rows)]
    )
    return Cut(ids=ids, offsets_N1=offsets, num_dropped_N=(lengths_N - kept_N).astype(np.int32))


def wrap_chunks(
    encoded: Encoded, info: TokenizerInfo, max_tokens: int, *, stride: int, num_head: int, inner_suffix: bool
) -> Cut:
    """Cut each text into rows of max_tokens, special tokens included; nothing is dropped.

    stride: tokens that a row shares with the one before.  num_head: tokens at the start of each text (a
    prompt's) that every row begins with.  inner_suffix: put the special tokens after a text behind each
    row, not only behind its last.
    Example: [CLS] [SEP] around ids 1..5, max_tokens 5, stride 1 -> [CLS] 1 2 3 [SEP], [CLS] 3 4 5 [SEP]
    """
    starts_T, lengths_T = encoded.offsets_N1[:-1], np.diff(encoded.offsets_N1)
    head_T = np.minimum(lengths_T, num_head)
    body_T = lengths_T - head_T
    room = max_tokens - info.num_special - num_head
    step = room - stride
    num_T = 1 + np.maximum(0, -(-(body_T - room) // step))
    text_N = np.repeat(np.arange(len(num_T)), num_T)
    index_N = np.arange(len(text_N)) - np.repeat(np.cumsum(num_T) - num_T, num_T)
    at_N = index_N * step
    is_last_N = index_N == num_T[text_N] - 1
    suffix = _same(info.suffix_ids, len(text_N))
    ids, offsets = _joined(
        [
            _same(info.prefix_ids, len(text_N)),
            _Piece(source=encoded.ids, starts_N=starts_T[text_N], lengths_N=head_T[text_N]),
            _Piece(
                source=encoded.ids,
                starts_N=(starts_T + head_T)[text_N] + at_N,
                lengths_N=np.minimum(room, body_T[text_N] - at_N),
            ),
            suffix if inner_suffix else replace(suffix, lengths_N=suffix.lengths_N * is_last_N),
        ]
    )
    first_new_N = np.where(index_N == 0, 0, len(info.prefix_ids) + head_T[text_N] + stride)
    chunks = Chunks(text_N=text_N, index_N=index_N.astype(np.int32), first_new_N=first_new_N.astype(np.int32))
    dropped_N = np.zeros(len(text_N), dtype=np.int32)
    return Cut(ids=ids, offsets_N1=offsets, num_dropped_N=dropped_N, chunks=chunks)


def wrap_pairs(first: Encoded, second: Encoded, pair: PairTemplate, max_tokens: int, side: str) -> Cut:
    """Join two texts a row and cut the longer one of them first, both evenly if that is not enough.

    Example: 5 and 2 tokens, room for 6 -> 4 and 2;  5 and 4, room for 6 -> 3 and 3
    Source: truncation "longest_first" of Hugging Face tokenizers 0.23, src/utils/truncation.rs.
    """
    lengths_N, seconds_N = np.diff(first.offsets_N1), np.diff(second.offsets_N1)
    room = max_tokens - pair.num_special
    kept_N, kept_seconds_N = share_room(lengths_N, seconds_N, room)
    rows = len(lengths_N)
    ids, offsets = _joined(
        [
            _same(pair.prefix_ids, rows),
            _part(first, kept_N, side),
            _same(pair.middle_ids, rows),
            _part(second, kept_seconds_N, side),
            _same(pair.suffix_ids, rows),
        ]
    )
    dropped_N = lengths_N - kept_N + seconds_N - kept_seconds_N
    starts_N = kept_N + len(pair.prefix_ids) + len(pair.middle_ids)
    return Cut(
        ids=ids,
        offsets_N1=offsets,
        num_dropped_N=dropped_N.astype(np.int32),
        pair_starts_N=starts_N.astype(np.int32),
    )


def share_room(first_N: Int64s, second_N: Int64s, room: int) -> tuple[Int64s, Int64s]:
    """Tokens to keep of each of two texts, at most `room` together.  See `wrap_pairs`."""
    short_N, long_N = np.minimum(first_N, second_N), np.maximum(first_N, second_N)
    fits_N = first_N + second_N <= room
    one_N = short_N * 2 <= room  # cutting the longer one is enough
    kept_short_N = np.where(fits_N | one_N, short_N, room // 2)
    kept_long_N = np.where(fits_N, long_N, np.where(one_N, room - short_N, room // 2 + room % 2))
    swapped_N = first_N > second_N
    return np.where(swapped_N, kept_long_N, kept_short_N), np.where(swapped_N, kept_short_N, kept_long_N)


def _part(encoded: Encoded, kept_N: Int64s, side: str) -> _Piece:
    """What is kept of each row."""
    dropped_N = np.diff(encoded.offsets_N1) - kept_N
    starts_N = encoded.offsets_N1[:-1] + (dropped_N if side == "left" else 0)
    return _Piece(source=encoded.ids, starts_N=starts_N, lengths_N=kept_N)


def _same(ids: Sequence[int], rows: int) -> _Piece:
    """The same ids in every row."""
    return _Piece(
        source=np.array(ids, dtype=np.int32),
        starts_N=np.zeros(rows, dtype=np.int64),
        lengths_N=np.full(rows, len(ids), dtype=np.int64),
    )


def _joined(pieces: Sequence[_Piece]) -> tuple[Int32s, Int64s]:
    """The pieces of each row one after another: ids and offsets."""
    lengths_N: Int64s = np.stack([piece.lengths_N for piece in pieces]).sum(axis=0)
    offsets_N1 = np.zeros(len(lengths_N) + 1, dtype=np.int64)
    np.cumsum(lengths_N, out=offsets_N1[1:])
    ids = np.empty(int(offsets_N1[-1]), dtype=np.int32)
    at_N = offsets_N1[:-1]
    for piece in pieces:
        ends_N = np.cumsum(piece.lengths_N)
        within = np.arange(int(ends_N[-1]) if len(ends_N) else 0) - np.repeat(
            ends_N - piece.lengths_N, piece.lengths_N
        )
        ids[np.repeat(at_N, piece.lengths_N) + within] = piece.source[
            np.repeat(piece.starts_N, piece.lengths_N) + within
        ]
        at_N = at_N + piece.lengths_N
    return ids, offsets_N1
