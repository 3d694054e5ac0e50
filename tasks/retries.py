"""When a task is run again: by the type of the error, never by its text."""

from __future__ import annotations

from typing import Any

from prefect.tasks import exponential_backoff

from tokenmill.errors import is_transient


def retry_if_transient(task: Any, task_run: Any, state: Any) -> bool:  # noqa: ARG001 (Prefect's signature)
    """Whether the failure may pass: storage or a backend that was unavailable."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and is_transient(error)


TRANSIENT_RETRIES: dict[str, Any] = {
    "retries": 4,
    "retry_delay_seconds": exponential_backoff(backoff_factor=5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": retry_if_transient,
    "persist_result": False,
    "cache_result_in_memory": False,
}
