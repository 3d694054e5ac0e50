"""Reading saved blocks by name, for a flow and its tasks.

Within one flow run a block is read once and then at most every few minutes: often enough for keys
that are renewed, seldom enough for thousands of shards. A server that is away does not stop them.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import httpx
from prefect.blocks.core import Block
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from pydantic import ValidationError

from tokenmill.errors import ConfigError, StoreUnavailableError

MAX_AGE_S = 300.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    block: Block
    read_at: float


_kept: dict[tuple[str, str, str], _Kept] = {}
_lock = threading.Lock()


def load_block(kind: type[Block], name: str, where: str) -> Block:
    """The block `name` of a kind, as saved.

    where: the key of the job that names it, for messages.
    Raises ConfigError (no such block, or settings that no job could have), StoreUnavailableError.
    """
    run_id = flow_run.id  # None outside of a flow run: read anew each time
    if run_id is None:
        return _read(kind, name, where)
    key = (run_id, kind.get_block_type_slug(), name)
    with _lock:
        kept = _kept.get(key)
        if kept is None or time.monotonic() - kept.read_at > MAX_AGE_S:
            kept = _Kept(block=_read_again(kind, name, where, kept), read_at=time.monotonic())
            _forget_other_runs(run_id)
            _kept[key] = kept
        return kept.block


def _read_again(kind: type[Block], name: str, where: str, kept: _Kept | None) -> Block:
    try:
        return _read(kind, name, where)
    except StoreUnavailableError as exc:
        if kept is None:
            raise
        _log.warning("%s; going on with the settings read before", exc)
        return kept.block


def _forget_other_runs(run_id: str) -> None:
    for key in [key for key in _kept if key[0] != run_id]:
        del _kept[key]


def _read(kind: type[Block], name: str, where: str) -> Block:
    slug = kind.get_block_type_slug()
    try:
        # Subtle: without _sync, Prefect hands back a coroutine where an event loop runs (notebooks).
        return cast(Block, cast(Any, kind).load(name, _sync=True))
    except httpx.TransportError as exc:
        server = get_current_settings().api.url or "Prefect's temporary server"
        raise StoreUnavailableError(f"{where}: block {slug}/{name}: {server} does not answer: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(
            f"{where}: there is no block {slug}/{name} on this Prefect server; save one in its UI or by "
            f"{kind.__name__}(...).save({name!r})"
        ) from exc
    except RuntimeError as exc:
        raise ConfigError(f"{where}: block {slug}/{name} is not valid: {_complaint(exc)}") from exc


def _complaint(exc: RuntimeError) -> str:
    """The first thing that is wrong with a block's settings, without the settings."""
    if not isinstance(exc.__cause__, ValidationError):
        return " ".join(str(exc).split())
    return first_complaint(exc.__cause__)


def first_complaint(exc: ValidationError) -> str:
    """Place and message of the first error. Never the input: it may be a secret."""
    first = exc.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
