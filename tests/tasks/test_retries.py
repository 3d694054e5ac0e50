"""A task is retried by the type of its error, never by its text."""

from __future__ import annotations

import pytest
from prefect.states import Failed

from tasks.retries import retry_if_transient
from tokenmill import errors


def every_leaf(root: type[Exception]) -> list[type[Exception]]:
    below = [leaf for child in root.__subclasses__() for leaf in every_leaf(child)]
    return [root, *below]


@pytest.mark.parametrize("kind", every_leaf(errors.TokenmillError))
def test_only_what_may_pass_is_retried(kind: type[Exception]) -> None:
    expected = kind in (errors.StoreUnavailableError, errors.BackendUnavailableError)
    state = Failed(message="x", data=kind("throttled, unavailable, try again"))
    assert retry_if_transient(None, None, state) is expected


def test_a_foreign_error_is_not_retried() -> None:
    assert retry_if_transient(None, None, Failed(message="x", data=ValueError("503"))) is False
