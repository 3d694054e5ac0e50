"""Numbers as people read them."""

from __future__ import annotations

import pytest

from tokenmill.quantities import count, counted, percent, seconds, short, significant, size_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (950, "950"), (2.5, "2.5"), (1000, "1k"), (999_900, "1M"), (1_234_567, "1.23M"), (3e12, "3T")],
)
def test_short_numbers_keep_three_figures(value: float, expected: str) -> None:
    assert short(value) == expected


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(n, "row") for n in (0, 1, 1234)] == ["0 rows", "1 row", "1,234 rows"]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, "0 %"), (1, "100 %"), (0.3623, "36.2 %"), (0.012, "1.2 %"), (1e-5, "<0.01 %"), (0.99999, ">99.9 %")],
)
def test_a_share_is_never_rounded_to_nothing_or_to_all(share: float, expected: str) -> None:
    assert percent(share) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 s"),
        (2e-7, "<1 µs"),
        (0.000012, "12 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (3.25, "3.25 s"),
        (99.4, "99.4 s"),
        (99.7, "1 min 40 s"),
        (754, "12 min 34 s"),
        (7380, "2 h 3 min"),
    ],
)
def test_seconds_choose_their_unit(value: float, expected: str) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0 B"), (1536, "1.5 KiB"), (1023, "1,023 B"), (5 << 40, "5 TiB"), (1 << 60, "1,048,576 TiB")],
)
def test_sizes_in_bytes(value: float, expected: str) -> None:
    assert size_bytes(value) == expected


def test_counts_have_thousands_separators_and_figures_are_shortened() -> None:
    assert (count(1234567), significant(0.1234567)) == ("1,234,567", 0.123457)
