"""Chat messages to token ids through the tokenizer's own chat template.

The template writes the special tokens itself, so none are put around the ids: no doubled BOS. A special
token that a message's content spells stays text, unless the job says otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenmill.errors import ModelMismatchError
from tokenmill.special_text import SpecialText
from tokenmill.tokenizer import Encoded, HuggingFaceTokenizer, LostChars, TokenizerInfo

FIRST_STAND_IN = 0x10F000  # private-use characters, which stand for special tokens that are text
LAST_STAND_IN = 0x10FFFD
STAND_IN = re.compile(f"[{chr(FIRST_STAND_IN)}-{chr(LAST_STAND_IN)}]")

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]


class ChatTemplate:
    """Renders the messages of a row.  Raises ValueError for what is no list of messages.

    keep_as_text: a special token in a content becomes a stand-in character, for `ChatTokenizer`.
    """

    def __init__(
        self,
        fast: Any,
        special_tokens: Sequence[str],
        *,
        keep_as_text: bool,
        generate: bool,
        form: Form | None,
    ) -> None:
        if not fast.chat_template:
            raise ModelMismatchError(
                "input.messages: the tokenizer has no chat template; use that of a chat model, or input.text"
            )
        self._fast, self._generate, self._form = fast, generate, form
        self._special = SpecialText(special_tokens)
        self._stand_ins = stand_ins(special_tokens) if keep_as_text else {}

    @property
    def key(self) -> str:
        """What of it changes token ids."""
        return f"{self._fast.chat_template} {self._generate} {self._form} {bool(self._stand_ins)}"

    def render(self, text: str) -> tuple[str, list[str]]:
        """The rendered text, and the special tokens that contents spell.  text: a JSON list of messages.

        Example: '[{"role": "user", "content": "hi"}]' -> "<|im_start|>user\\nhi<|im_end|>\\n", []
        """
        from jinja2 import TemplateError

        messages = _messages(text)
        contents = _contents(messages)
        if any(STAND_IN.search(content) for content in contents):
            raise ValueError("a content holds private-use characters from U+10F000 on")
        try:
            rendered = self._fast.apply_chat_template(
                [self._guarded(message) for message in messages],
                tokenize=False,
                add_generation_prompt=self._generate,
            )
        except (TemplateError, TypeError, KeyError) as exc:
            raise ValueError(f"the chat template refuses it: {' '.join(str(exc).split())}") from exc
        found = [token for content in contents for token in self._special.find(content)]
        return unicodedata.normalize(self._form, rendered) if self._form else str(rendered), found

    def _guarded(self, value: Any) -> Any:
        """A message with stand-ins in place of special tokens, wherever its strings are."""
        if isinstance(value, str):
            if not self._stand_ins or self._special.pattern is None:
                return value
            return self._special.pattern.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, Mapping):
            return {name: self._guarded(inner) for name, inner in value.items()}
        return [self._guarded(inner) for inner in value] if isinstance(value, list) else value


def stand_ins(special_tokens: Sequence[str]) -> dict[str, str]:
    """A private-use character for each special token."""
    return {token: chr(FIRST_STAND_IN + place) for place, token in enumerate(special_tokens)}


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"not JSON: {exc}") from exc
    if not isinstance(messages, list) or not messages:
        raise ValueError("not a list of messages")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {place} has no role")
    # Subtle: a table gives every message every key; templates ask whether a key is there.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _contents(value: Any) -> list[str]:
    """Every string below a list of messages."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _contents(item)]


class ChatTokenizer:
    """Rendered messages to ids.  Implements `tokenmill.tokenizer.Tokenizer`; puts nothing around a row.

    obeying: takes special tokens for what they are.  literal: the same tokenizer, taking them for text.
    """

    def __init__(
        self, obeying: HuggingFaceTokenizer, literal: HuggingFaceTokenizer, template: ChatTemplate
    ) -> None:
        self._obeying, self._literal = obeying, literal
        tokens = obeying.info.special_tokens
        self._tokens = {stand_in: token for token, stand_in in stand_ins(tokens).items()}
        self._special = SpecialText(tokens).pattern
        made = hashlib.sha256(f"{obeying.info.fingerprint} {template.key}".encode()).hexdigest()[:32]
        self.info: TokenizerInfo = replace(
            obeying.info, fingerprint=made, prefix_ids=(), suffix_ids=(), pair=None
        )

    def encode(self, texts: Sequence[str]) -> Encoded:
        mixed = [row for row, text in enumerate(texts) if STAND_IN.search(text)]
        if not mixed:
            return self._obeying.encode(texts)
        plain = self._obeying.encode(["" if row in set(mixed) else text for row, text in enumerate(texts)])
        rows = [plain.ids[a:b] for a, b in zip(plain.offsets_N1[:-1], plain.offsets_N1[1:], strict=True)]
        for row in mixed:
            rows[row] = self._mixed(texts[row])
        offsets_N1 = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return Encoded(ids=np.concatenate(rows).astype(np.int32), offsets_N1=offsets_N1)

    def _mixed(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of a text in which some special tokens are text: cut at those that are not."""
        assert self._special is not None
        pieces = [self._literal.encode([self._restored(part)]).ids for part in self._special.split(text)]
        specials = [self._obeying.encode([token]).ids for token in self._special.findall(text)]
        ids = [pieces[0], *(part for pair in zip(specials, pieces[1:], strict=True) for part in pair)]
        return np.concatenate(ids)

    def _restored(self, text: str) -> str:
        return STAND_IN.sub(lambda match: self._tokens[match[0]], text)

    def decode(self, ids: Sequence[int], without_special: bool) -> str:
        return self._obeying.decode(ids, without_special)

    def lost_chars(self, texts: Sequence[str], has_unknown_N: npt.NDArray[np.bool_]) -> LostChars:
        return self._obeying.lost_chars([self._restored(text) for text in texts], has_unknown_N)
