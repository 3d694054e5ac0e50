"""Foreign storage errors, mapped to ours in one place: those of the system, fsspec and what it calls."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import fsspec

from tokenmill.errors import DataError, StoreError, StoreUnavailableError, TokenmillError

TRANSIENT_ERRNO = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET}
    | {errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.ENETUNREACH, errno.EPIPE, errno.ETIMEDOUT}
    | {getattr(errno, "EREMOTEIO", errno.EIO)}  # s3fs: 500 InternalError
)
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
# Subtle: an answer to HEAD has no body, so no code but its status: 400 for an expired token, or 403.
EXPIRED_HEAD = "400"
REFUSED = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AccessDenied"}
    | {"RequestTimeTooSkewed", "403"}
)
CHANGED = frozenset({"PreconditionFailed", "412"})
TRANSIENT_CLASSES = frozenset(
    {"ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"}  # aiohttp
    | {"HTTPClientError", "ConnectionError", "EndpointConnectionError"}  # botocore
    | {"ReadTimeoutError", "ConnectTimeoutError", "IncompleteReadError", "ResponseStreamingError"}
    | {"ConnectionClosedError", "FSTimeoutError"}
    | {"ServiceRequestError", "ServiceResponseError", "TransportError"}  # azure.core, google.auth
    | {"FlexibleChecksumError", "ResponseParserError"}  # botocore: a body that was damaged on its way
)
FOREIGN = frozenset({"botocore", "aiobotocore", "aiohttp", "fsspec", "gcsfs", "google", "azure"})
REFUSING_STATUS, BUSY_STATUS, FIRST_SERVER_FAULT = (401, 403, 407), (408, 425, 429), 500


def map_error(exc: BaseException, what: str) -> TokenmillError:
    """The tokenmill error for a foreign storage error. `what` names the file and the action."""
    if isinstance(exc, TokenmillError):
        return exc
    detail = f"{what}: {type(exc).__name__}: {exc}"
    code = _answer_code(exc)
    if code in {*EXPIRED, EXPIRED_HEAD}:
        perhaps = " or the region is wrong" if code == EXPIRED_HEAD else ""
        return StoreUnavailableError(
            f"{what}: the credentials have expired{perhaps} ({code}); renew them and run again: "
            "finished shards are kept"
        )
    if code in REFUSED:
        return StoreError(
            f"{what}: the storage refuses the credentials ({code}); "
            "check key, secret, rights and this machine's clock"
        )
    status = _http_status(exc)
    if status is not None:
        return _status_error(status, str(getattr(exc, "message", "")).partition("\n")[0], what)
    names = {cls.__name__ for cls in type(exc).__mro__}
    if code in CHANGED or "FileExpired" in names:
        return DataError(f"{what}: changed while the job ran; run the job again")
    if isinstance(exc, ConnectionError | TimeoutError) or names & TRANSIENT_CLASSES:
        return StoreUnavailableError(detail)
    if isinstance(exc, OSError) and exc.errno in TRANSIENT_ERRNO:
        return StoreUnavailableError(detail)
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"{what}: the disk is full; free some space and run again")
    return StoreError(detail)


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Raise foreign I/O errors of the block as StoreError or StoreUnavailableError."""
    try:
        yield
    except TokenmillError:
        raise
    except Exception as exc:
        failed = _behind(exc)
        if not is_storage_error(failed):
            raise
        if _answer_code(failed) in {*EXPIRED, EXPIRED_HEAD}:
            fsspec.get_filesystem_class("s3").clear_instance_cache()  # a retry opens a new session
        raise map_error(failed, what) from failed


def _behind(exc: Exception) -> Exception:
    """The error itself. Subtle: s3fs looks for the number of a time-out, which has none: IndexError."""
    before = exc.__context__
    return before if isinstance(exc, IndexError) and isinstance(before, TimeoutError) else exc


def _answer_code(exc: BaseException) -> str | None:
    """The code that S3 answered with. Subtle: s3fs raises its own error from botocore's."""
    for found in (exc, exc.__cause__):
        answer = getattr(found, "response", None)
        if isinstance(answer, Mapping) and isinstance(answer.get("Error"), Mapping):
            return str(answer["Error"].get("Code"))
    return None


def _http_status(exc: BaseException) -> int | None:
    """What a server answered, as aiohttp, azure.core and gcsfs tell it."""
    told = (getattr(exc, name, None) for name in ("status", "status_code", "code"))
    return next((int(status) for status in told if isinstance(status, int)), None)


def _status_error(status: int, message: str, what: str) -> StoreError:
    """Subtle: the text of aiohttp's error is left out; it holds the URL that a redirect has signed."""
    if status in REFUSING_STATUS:
        return StoreError(f"{what}: access is refused (HTTP {status}); check the credentials and rights")
    may_pass = status in BUSY_STATUS or status >= FIRST_SERVER_FAULT
    kind = StoreUnavailableError if may_pass else StoreError
    return kind(f"{what}: HTTP {status} {message}".rstrip())


def is_storage_error(exc: Exception) -> bool:
    """Whether it comes from the operating system, fsspec or a library that fsspec calls."""
    modules = {cls.__module__.partition(".")[0] for cls in type(exc).__mro__}
    return isinstance(exc, OSError) or bool(modules & FOREIGN)
