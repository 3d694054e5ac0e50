"""Texts of a batch to token rows: rendered, encoded, joined, cut, and each row's refusal, if any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.cut import Cut, Int64s, wrap_chunks, wrap_pairs, wrap_rows
from tokenmill.settle import TokenizeSetup
from tokenmill.special_text import SpecialText
from tokenmill.tokenizer import Encoded, LostChars

Refusals = dict[int, tuple[str, str]]  # row -> reason, detail


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """A batch of texts as token rows. Refused rows are still among them.

    cut: a row a text, or several where texts are cut into chunks; num_unknown_N as well. All else is by text.
    lengths_N: tokens before the cut, special ones included.  special_N: special tokens spelled in a text.
    """

    cut: Cut
    lengths_N: Int64s
    special_N: Int64s
    lost: LostChars
    num_unknown_N: npt.NDArray[np.int32]
    refused: Refusals


def encode_rows(setup: TokenizeSetup, texts: Sequence[str], pairs: Sequence[str] | None = None) -> TokenRows:
    """Token rows of texts, in order.  pairs: the second text of each row, where the job has pairs."""
    rendered, special_N, refused = _render(setup, texts, pairs)
    info = setup.tokenizer.info
    first = setup.tokenizer.encode([setup.prompt + text for text in rendered])
    cut, lengths_N, second = _wrapped(setup, first, pairs)
    around = sum(token == info.unknown_id for token in _template_ids(setup, pairs))
    # Subtle: GPT-2's unknown token is also the one that some tokenizers put around every row.
    unknown_N = np.maximum(_num_unknown(cut, info.unknown_id) - around, 0).astype(np.int32)
    lost = setup.tokenizer.lost_chars(rendered, _num_unknown(first, info.unknown_id) > 0)
    if pairs is not None and second is not None:
        other = setup.tokenizer.lost_chars(pairs, _num_unknown(second, info.unknown_id) > 0)
        lost = LostChars(
            removed_N=lost.removed_N + other.removed_N, unknown_N=lost.unknown_N + other.unknown_N
        )
    refused = {**_refusals(setup, lengths_N, cut), **refused}
    return TokenRows(
        cut=cut, lengths_N=lengths_N, special_N=special_N, lost=lost, num_unknown_N=unknown_N, refused=refused
    )


def _render(
    setup: TokenizeSetup, texts: Sequence[str], pairs: Sequence[str] | None
) -> tuple[Sequence[str], Int64s, Refusals]:
    """What is encoded of each row, how many special tokens its text spells, and rows refused for that."""
    refused: Refusals = {}
    rendered = texts
    if setup.chat is None:
        special = SpecialText(setup.tokenizer.info.special_tokens)
        found = [special.find(text) for text in texts]
        if pairs is not None:
            found = [[*own, *special.find(pair)] for own, pair in zip(found, pairs, strict=True)]
    else:
        rows: list[tuple[str, list[str]]] = []
        for row, text in enumerate(texts):
            try:
                rows.append(setup.chat.render(text))
            except ValueError as exc:
                rows.append(("", []))
                refused[row] = ("bad_messages", str(exc))
        rendered, found = [made for made, _ in rows], [spelled for _, spelled in rows]
    if setup.special_tokens_in_text == "reject":
        for row, tokens in enumerate(found):
            if tokens:
                refused[row] = ("special_token", f"the text spells {tokens[0]!r}, a special token")
    return rendered, np.array([len(tokens) for tokens in found], dtype=np.int64), refused


def _wrapped(
    setup: TokenizeSetup, first: Encoded, pairs: Sequence[str] | None
) -> tuple[Cut, Int64s, Encoded | None]:
    info, side = setup.tokenizer.info, setup.truncation_side
    if pairs is None:
        chunked = setup.overflow == "chunk"
        cut = _wrap_chunks(setup, first) if chunked else wrap_rows(first, info, setup.max_tokens, side)
        return cut, np.diff(first.offsets_N1) + info.num_special, None
    assert info.pair is not None  # settle refuses pairs for a tokenizer without a pair template
    second = setup.tokenizer.encode(pairs)
    cut = wrap_pairs(first, second, info.pair, setup.max_tokens, side)
    lengths_N = np.diff(first.offsets_N1) + np.diff(second.offsets_N1) + info.pair.num_special
    return cut, lengths_N, second


def _wrap_chunks(setup: TokenizeSetup, encoded: Encoded) -> Cut:
    info = setup.tokenizer.info
    return wrap_chunks(
        encoded,
        info,
        setup.max_tokens,
        stride=setup.stride,
        num_head=max(0, setup.num_prompt_tokens - len(info.prefix_ids)),
        inner_suffix=setup.inner_suffix,
    )


def _template_ids(setup: TokenizeSetup, pairs: Sequence[str] | None) -> tuple[int, ...]:
    """Special tokens around every row."""
    info = setup.tokenizer.info
    if pairs is None or info.pair is None:
        return (*info.prefix_ids, *info.suffix_ids)
    return (*info.pair.prefix_ids, *info.pair.middle_ids, *info.pair.suffix_ids)


def _num_unknown(rows: Cut | Encoded, unknown: int | None) -> Int64s:
    """Tokens of each row that are the unknown one."""
    is_unknown = (rows.ids == unknown) if unknown is not None else np.zeros(len(rows.ids), bool)
    sums = np.concatenate(([0], np.cumsum(is_unknown)))
    return np.diff(sums[rows.offsets_N1])


def _refusals(setup: TokenizeSetup, lengths_N: Int64s, cut: Cut) -> Refusals:
    """Rows that cannot go on: empty, too long, or beyond the model's vocabulary."""
    result: Refusals = {}
    for row in np.flatnonzero(lengths_N == 0).tolist():
        result[row] = ("no_tokens", "the text has no tokens, and the model adds none")
    if setup.overflow == "reject":
        for row in np.flatnonzero(cut.num_dropped_N > 0).tolist():
            result[row] = ("too_long", f"{lengths_N[row]} tokens, tokenizer.max_tokens is {setup.max_tokens}")
    if setup.model_vocab_size is not None:
        for place in np.flatnonzero(cut.ids >= setup.model_vocab_size).tolist():
            row = int(np.searchsorted(cut.offsets_N1, place, side="right")) - 1
            row = row if cut.chunks is None else int(cut.chunks.text_N[row])
            detail = f"token id {cut.ids[place]}, the model knows ids below {setup.model_vocab_size}"
            result[row] = ("id_unknown_to_model", detail)
    return result
