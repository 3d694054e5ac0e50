"""Shard keys: names that say which input, tokenizer, model and options a part was made from.

Two shards have the same key if and only if their parts may stand for each other. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tokenmill.schemas import REJECTS_VERSION, RESULTS_VERSION, TOKENS_VERSION

KEY_LENGTH = 32


def fingerprint(value: Any) -> str:
    """Hash of plain values (dicts in any order, lists, strings, numbers), 32 hex digits.

    Example: fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:KEY_LENGTH]


def tokenize_key(slices: list[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Key of a token part: the slice of the corpus, and every option that changes its ids."""
    return fingerprint(
        {"stage": "tokenize", "version": [TOKENS_VERSION, REJECTS_VERSION], "slices": slices, **options}
    )


def infer_key(tokens_key: str, options: Mapping[str, Any]) -> str:
    """Key of a result part: its token part, and every option that changes its results."""
    return fingerprint(
        {"stage": "infer", "version": [RESULTS_VERSION, REJECTS_VERSION], "tokens": tokens_key, **options}
    )
