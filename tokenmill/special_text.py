"""Texts that spell a special token, such as "[SEP]" or "<|im_end|>": found and counted. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

PREFIX_CHARS = 2


class SpecialText:
    """Finds special tokens spelled out in texts."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._beginnings = sorted({token[:PREFIX_CHARS] for token in tokens})
        longest_first = sorted(tokens, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None

    def find(self, text: str) -> list[str]:
        """Those that a text spells, in order.

        Example: tokens ["[SEP]"], "a [SEP] [sep]" -> ["[SEP]"]
        """
        # Subtle: most texts hold none; looking for a few beginnings is many times faster than the pattern.
        if self.pattern is None or not any(beginning in text for beginning in self._beginnings):
            return []
        return self.pattern.findall(text)
