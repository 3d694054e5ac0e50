"""Text to token ids, exactly as the model expects them, in Rust batches.

One Protocol, one adapter over Hugging Face's fast tokenizers. Special tokens are put around the ids, and
rows are cut, in `tokenmill.cut`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.errors import ModelMismatchError, ModelNotFoundError
from tokenmill.model_files import FolderState, first_line, folder_state
from tokenmill.removed import RemovedCharacters

Int32s = npt.NDArray[np.int32]

PROBES = ("a", "A b c.", "", "été 漢字 😀")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Ragged ids without special tokens: row r is ids[offsets[r]:offsets[r+1]]."""

    ids: Int32s
    offsets_N1: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairTemplate:
    """How two texts are joined: prefix, first, middle, second, suffix.

    second_type: token type of the second text and what follows it; that of the first is 0.
    """

    prefix_ids: tuple[int, ...]
    middle_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    second_type: int

    @property
    def num_special(self) -> int:
        return len(self.prefix_ids) + len(self.middle_ids) + len(self.suffix_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What the engine must know of a tokenizer."""

    fingerprint: str
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    unknown_id: int | None
    pad_id: int
    vocab_size: int
    max_tokens: int | None
    special_tokens: tuple[str, ...] = ()
    pair: PairTemplate | None = None

    @property
    def num_special(self) -> int:
        """Special tokens around each row."""
        return len(self.prefix_ids) + len(self.suffix_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class LostChars:
    """Characters of each text that the model never sees.

    removed_N: taken out by the normaliser.  unknown_N: behind unknown tokens.
    """

    removed_N: npt.NDArray[np.int64]
    unknown_N: npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """The whole contract."""

    @property
    def info(self) -> TokenizerInfo: ...

    def lost_chars(self, texts: Sequence[str], has_unknown_N: npt.NDArray[np.bool_]) -> LostChars:
        """What is lost of each text.  has_unknown_N: whether it has an unknown token."""
        ...

    def encode(self, texts: Sequence[str]) -> Encoded:
        """All ids of each text, special tokens not added, nothing cut."""
        ...

    def decode(self, ids: Sequence[int], without_special: bool) -> str:
        """The text of ids.  without_special: special tokens are left out."""
        ...


class HuggingFaceTokenizer:
    """A fast tokenizer of `transformers`; `encode` releases the GIL and uses all cores."""

    def __init__(self, fast: Any, parse_special_tokens: bool, lower_case: bool = False) -> None:
        self.fast, self._backend = fast, fast.backend_tokenizer
        if lower_case:
            _lower_case(self._backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = not parse_special_tokens
        prefix, suffix = _special_template(self._backend)
        pad = fast.pad_token_id
        longest = fast.model_max_length
        self.info = TokenizerInfo(
            fingerprint=_fingerprint(self._backend, prefix, suffix),
            prefix_ids=prefix,
            suffix_ids=suffix,
            unknown_id=fast.unk_token_id,
            pad_id=pad if pad is not None else (fast.eos_token_id or 0),
            vocab_size=len(fast),
            max_tokens=longest if longest and longest < 10**9 else None,
            special_tokens=_special_tokens(self._backend),
            pair=_pair_template(self._backend),
        )
        self._removed = RemovedCharacters(self._backend.normalizer)

    def encode(self, texts: Sequence[str]) -> Encoded:
        rows = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        lists = [row.ids for row in rows]
        offsets = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        flat = np.fromiter((i for ids in lists for i in ids), np.int32, count=int(offsets[-1]))
        return Encoded(ids=flat, offsets_N1=offsets)

    def decode(self, ids: Sequence[int], without_special: bool) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=without_special))

    def open_ended(self) -> HuggingFaceTokenizer:
        """The same, but no special token after a row: what a prompt needs to be gone on from."""
        if not self.info.suffix_ids:
            return self
        other = copy.copy(self)
        made = hashlib.sha256(f"{self.info.fingerprint} open".encode()).hexdigest()[:32]
        other.info = replace(self.info, fingerprint=made, suffix_ids=(), pair=None)
        return other

    def lost_chars(self, texts: Sequence[str], has_unknown_N: npt.NDArray[np.bool_]) -> LostChars:
        unknown_N = np.zeros(len(texts), dtype=np.int64)
        rows = np.flatnonzero(has_unknown_N).tolist()
        encoded = self._backend.encode_batch([texts[row] for row in rows], add_special_tokens=False)
        for row, found in zip(rows, encoded, strict=True):
            spans = zip(found.ids, found.offsets, strict=True)
            unknown_N[row] = sum(stop - start for i, (start, stop) in spans if i == self.info.unknown_id)
        return LostChars(removed_N=self._removed.count(texts), unknown_N=unknown_N)


def _special_tokens(backend: Any) -> tuple[str, ...]:
    """What a text would have to spell to be taken for a special token."""
    added = backend.get_added_tokens_decoder().values()
    return tuple(sorted(token.content for token in added if token.special and token.content))


def _pair_template(backend: Any) -> PairTemplate | None:
    """How it joins two texts; None where that is not by fixed ids around and between them."""
    first, second = (backend.encode(text, add_special_tokens=False).ids for text in ("a", "b c"))
    whole = backend.encode("a", "b c", add_special_tokens=True)
    places = [
        (i, j)
        for i in range(len(whole.ids) - len(first) + 1)
        for j in range(i + len(first), len(whole.ids) - len(second) + 1)
        if whole.ids[i : i + len(first)] == first and whole.ids[j : j + len(second)] == second
    ]
    if not first or not second or not places:
        return None
    i, j = places[0]
    return PairTemplate(
        prefix_ids=tuple(whole.ids[:i]),
        middle_ids=tuple(whole.ids[i + len(first) : j]),
        suffix_ids=tuple(whole.ids[j + len(second) :]),
        second_type=whole.type_ids[j],
    )


def _lower_case(backend: Any) -> None:
    """Lower-case what is not a special token, before all else. Source: sentence-transformers 6."""
    from tokenizers import normalizers

    known = backend.normalizer
    if not _lowers(json.loads(backend.to_str())["normalizer"]):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([known] if known else [])])


def _lowers(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    own = normalizer["type"] == "Lowercase" or bool(normalizer.get("lowercase"))
    return own or any(_lowers(inner) for inner in normalizer.get("normalizers", []))


def _special_template(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids put before and after every row.  Raises ModelMismatchError if it is not that simple."""
    whole = backend.encode("a", add_special_tokens=True).ids
    inner = backend.encode("a", add_special_tokens=False).ids
    starts = [i for i in range(len(whole) - len(inner) + 1) if whole[i : i + len(inner)] == inner]
    for start in starts:
        prefix, suffix = whole[:start], whole[start + len(inner) :]
        if all(_wraps(backend, prefix, suffix, text) for text in PROBES):
            return tuple(prefix), tuple(suffix)
    raise ModelMismatchError("tokenizer: its special tokens are not a fixed prefix and suffix")


def _wraps(backend: Any, prefix: list[int], suffix: list[int], text: str) -> bool:
    inner = backend.encode(text, add_special_tokens=False).ids
    return bool(backend.encode(text, add_special_tokens=True).ids == [*prefix, *inner, *suffix])


def _fingerprint(backend: Any, prefix: Sequence[int], suffix: Sequence[int]) -> str:
    """Hash of everything that decides ids: vocabulary, merges, normaliser, template."""
    text = f"{backend.to_str()} {list(prefix)} {list(suffix)} {backend.encode_special_tokens}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def load_tokenizer(
    folder: Path, parse_special_tokens: bool, trust_remote_code: bool = False, lower_case: bool = False
) -> HuggingFaceTokenizer:
    """A tokenizer from a local folder, loaded once until its files change; no network.

    Raises ModelNotFoundError, ModelMismatchError.
    """
    state = folder_state(folder)
    return _load_tokenizer(folder, state, parse_special_tokens, trust_remote_code, lower_case)


@functools.lru_cache(maxsize=8)
def _load_tokenizer(
    folder: Path,
    state: FolderState,  # noqa: ARG001 (what the cache goes by)
    parse_special_tokens: bool,
    trust_remote_code: bool,
    lower_case: bool,
) -> HuggingFaceTokenizer:
    from transformers import AutoTokenizer

    try:
        fast = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code, use_fast=True
        )
    except Exception as exc:  # whatever damaged files provoke in foreign code
        raise ModelNotFoundError(f"tokenizer {folder}: cannot be loaded: {first_line(exc)}") from exc
    if not getattr(fast, "is_fast", False):
        raise ModelMismatchError(f"tokenizer {folder}: has no fast (Rust) form; convert it to tokenizer.json")
    return HuggingFaceTokenizer(fast, parse_special_tokens, lower_case)
