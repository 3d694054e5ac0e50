"""The tree of errors is the one that is drawn, and a retry goes by type alone."""

from __future__ import annotations

import re

import pytest

from tokenmill import errors
from tokenmill.errors import TokenmillError, is_transient

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TokenmillError)
}


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^(.*?)([A-Z]\w*Error)\b", line)
        if found and line.startswith("    "):
            drawn.append((len(found.group(1)), found.group(2)))
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for depth, name in drawn:
        while path and path[-1][0] >= depth:
            path.pop()
        if path:
            parents[name] = path[-1][1]
        path.append((depth, name))
    assert {name for _, name in drawn} == set(CLASSES)
    assert parents == {
        name: kind.__bases__[0].__name__ for name, kind in CLASSES.items() if kind is not TokenmillError
    }


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_every_error_says_what_it_means_and_how_the_command_ends(kind: type[TokenmillError]) -> None:
    assert kind.__doc__
    assert kind.exit_code in (1, 2, 3)
    assert is_transient(kind("x")) == kind.__name__.endswith("UnavailableError")


def test_exit_codes_are_those_that_are_documented() -> None:
    codes = {name: kind.exit_code for name, kind in CLASSES.items()}
    assert {name for name, code in codes.items() if code == 3} == {"RejectLimitError"}
    config = {name for name, kind in CLASSES.items() if issubclass(kind, errors.ConfigError)}
    assert {name for name, code in codes.items() if code == 2} == config | {"UnreadableFileError"}


def test_foreign_errors_are_not_retried() -> None:
    assert not is_transient(ValueError("connection reset"))
    assert not is_transient(KeyboardInterrupt())
