"""Files behind HTTP, read only: fsspec's file system, made to tell the truth.

fsspec's own takes every failure for a missing file, a short answer for the end of the file, and
decodes what a server encodes. Needs aiohttp; imported only for such a URL.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import IO, Any

from aiohttp import ClientResponse, ClientTimeout
from fsspec.implementations.http import HTTPFileSystem
from fsspec.spec import AbstractBufferedFile
from yarl import URL

from tokenmill.errors import StoreError, StoreUnavailableError
from tokenmill.uris import path_of

CONNECT_S, READ_S = 20, 60
GONE = (404, 410)
PARTIAL, BEYOND_END = 206, 416
COMPRESSED = (".gz", ".zst", ".zstd")


class WebFiles(HTTPFileSystem):  # type: ignore[misc]
    """Bytes as they are stored. Proxies and ~/.netrc are those of the environment.

    headers, client_kwargs: what fsspec's own configuration adds, such as an Authorization.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        client = {
            "timeout": ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S),
            "trust_env": True,
            **(client_kwargs or {}),
            "auto_decompress": False,
            "requote_redirect_url": False,
        }
        plain = {**(headers or {}), "Accept-Encoding": "identity"}
        super().__init__(client_kwargs=client, headers=plain, **options)

    def encode_url(self, url: str) -> URL:
        """The URL as it is written; only what no URL may hold is quoted."""
        return URL(url, encoded=url.isascii() and " " not in url)

    async def _info(self, url: str, **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002
        """Size, version, and whether ranges are served: what the answer to a GET of one byte tells.

        Raises FileNotFoundError, aiohttp's errors, StoreError.
        """
        async with self._get(url, 0, 1) as answer:
            _refuse_encoded(answer, url)
            return {
                "name": url,
                "type": "file",
                "size": _size(answer),
                "partial": answer.status == PARTIAL,
                "ETag": answer.headers.get("ETag"),
                "LastModified": answer.headers.get("Last-Modified"),
            }

    async def _cat_file(
        self, url: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """All of the file, or exactly the range.  Raises StoreUnavailableError for any other bytes."""
        if start is None or end is None:
            return await super()._cat_file(url, start, end, **kwargs)  # type: ignore[no-any-return]
        async with self._get(url, start, end) as answer:
            data = await answer.read() if answer.status == PARTIAL else b""
        if len(data) != end - start:
            raise StoreUnavailableError(
                f"{url}: HTTP {answer.status} with {len(data)} bytes for the range {start}-{end - 1}"
            )
        return data

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int) -> AsyncIterator[ClientResponse]:
        session = await self.set_session()
        headers = {**self.kwargs["headers"], "Range": f"bytes={start}-{end - 1}"}
        async with session.get(self.encode_url(url), headers=headers) as answer:
            if answer.status in GONE:
                raise FileNotFoundError(url)
            if answer.status != BEYOND_END:
                answer.raise_for_status()
            yield answer

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> IO[bytes]:
        """The file, with seeks; a server that serves no ranges is read whole, to a scratch file."""
        info = self.info(path)
        if info["partial"] and info["size"] is not None:
            return AbstractBufferedFile(self, path, mode, block_size or "default", size=info["size"])  # type: ignore[no-any-return]
        with ExitStack() as undo:
            scratch = undo.enter_context(tempfile.TemporaryFile())
            self.get_file(path, scratch)
            scratch.seek(0)
            undo.pop_all()
        return scratch


def _size(answer: ClientResponse) -> int | None:
    """Example: Content-Range: bytes 0-0/123 -> 123; a chunked answer tells none"""
    if answer.status in (PARTIAL, BEYOND_END):
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        return int(total) if total.isdecimal() else None
    return answer.content_length


def _refuse_encoded(answer: ClientResponse, url: str) -> None:
    """Subtle: "gzip" on a .gz file tells of the file's own bytes; on another, of the way here."""
    encoding = answer.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity" and not path_of(url).lower().endswith(COMPRESSED):
        raise StoreError(f"{url}: the server encodes it ({encoding}) unasked; download the file and name it")
