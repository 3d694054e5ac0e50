"""What a normaliser takes out is counted, against the normaliser itself."""

from __future__ import annotations

import pytest
from tokenizers import normalizers

from tokenmill.removed import RemovedCharacters


@pytest.mark.parametrize(
    ("normalizer", "text", "expected"),
    [
        (normalizers.BertNormalizer(), "a\x00b\ufffd\x07c", 3),
        (normalizers.BertNormalizer(), "a\tb\nc\u00a0d", 0),
        (normalizers.BertNormalizer(), "a\u0301", 1),
        (normalizers.BertNormalizer(strip_accents=False), "a\u0301", 0),
        (normalizers.Strip(), " a ", 0),
        (normalizers.NFKC(), "ﬁ", 0),
        (normalizers.Replace("x", ""), "axbx", 2),
        (None, "a\x00", 0),
    ],
)
def test_characters_that_vanish_are_counted(normalizer: object, text: str, expected: int) -> None:
    counter = RemovedCharacters(normalizer)
    assert counter.count([text, "", text]).tolist() == [expected, 0, expected]


def test_no_texts_are_no_counts() -> None:
    assert RemovedCharacters(normalizers.BertNormalizer()).count([]).tolist() == []
