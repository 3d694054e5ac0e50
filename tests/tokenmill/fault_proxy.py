"""A proxy in front of an S3 server that fails on purpose, and the ways in which servers fail.

Requests are forwarded byte for byte. A rule looks at each and may give an act to do in its place:

    proxy.rule = at(7, reset)                             # the seventh request
    proxy.rule = first_time(slow_down)                    # every request once; its repetition passes
    proxy.rule = matching("GET", "in/a.csv", cut_short)   # these, for ever
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import md5
from urllib.parse import unquote

HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "keep-alive"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """head: request line and headers as they came, without the blank line.  body: as it came, framing too."""

    method: str
    target: str
    headers: dict[str, str]
    head: bytes
    body: bytes

    @property
    def key(self) -> str:
        """Bucket and key, unquoted, and the query. Example: "corpus/in/a b.csv?uploads"."""
        return unquote(self.target).lstrip("/")

    @property
    def is_copy(self) -> bool:
        return "x-amz-copy-source" in self.headers

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for a request and its repetition."""
        wanted = (self.headers.get("range", ""), self.headers.get("if-match", ""))
        return (self.method, self.target, *wanted, md5(self.body).hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server says; the length that it promises is that of the body, unless a header says more."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def to_bytes(self) -> bytes:
        names = {name.lower() for name, _ in self.headers}
        length = () if "content-length" in names else (("Content-Length", str(len(self.body))),)
        lines = [f"{name}: {value}" for name, value in (*self.headers, *length)]
        phrase = http.client.responses.get(self.status, "Unknown")
        head = "\r\n".join([f"HTTP/1.1 {self.status} {phrase}", *lines])
        return head.encode("latin-1") + b"\r\n\r\n" + self.body


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and the two connections that it concerns."""

    request: Request
    proxy: FaultProxy
    client: socket.socket

    def forward(self) -> Answer:
        """The real server's answer; the client hears nothing of it yet."""
        with contextlib.closing(socket.create_connection(self.proxy.backend, timeout=20)) as server:
            server.sendall(self.request.head + b"\r\nConnection: close\r\n\r\n" + self.request.body)
            answer = http.client.HTTPResponse(server, method=self.request.method)
            answer.begin()
            body = answer.read()
            headers = tuple((k, v) for k, v in answer.getheaders() if k.lower() not in HOP_BY_HOP)
            return Answer(status=answer.status, headers=headers, body=body)

    def send(self, answer: Answer) -> None:
        self.client.sendall(answer.to_bytes())

    def reset(self) -> None:
        """End the connection as a crashed server does: an RST, not a FIN.  Raises OSError for the handler."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.close()
        raise ConnectionAbortedError


Act = Callable[[Exchange], None]
Rule = Callable[[Request, int], Act | None]


class FaultProxy(socketserver.ThreadingTCPServer):
    """Listens on a free port of this machine; `requests` are all that came, in order."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(self, backend: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = backend
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.rule: Rule = undisturbed
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()

    def act_for(self, request: Request) -> Act:
        with self._lock:
            self.requests.append(request)
            return self.rule(request, len(self.requests) - 1) or passed_on

    def undisturb(self) -> None:
        """Pass everything on, and count anew."""
        with self._lock:
            self.rule, self.requests = undisturbed, []

    def keep(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.add(client)

    def forget(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.discard(client)

    def stop(self) -> None:
        """No thread and no connection is left."""
        self.shutdown()
        with self._lock:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Handler(socketserver.BaseRequestHandler):
    server: FaultProxy

    def handle(self) -> None:
        client: socket.socket = self.request
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.keep(client)
        try:
            with client.makefile("rb") as stream, contextlib.suppress(OSError):
                while (request := _read_request(stream, client)) is not None:
                    self.server.act_for(request)(Exchange(request, self.server, client))
        finally:
            self.server.forget(client)


def _read_request(stream: object, client: socket.socket) -> Request | None:
    """The next request of a connection, whole; None at its end."""
    first = stream.readline()  # type: ignore[attr-defined]
    if not first.strip():
        return None
    lines = [first.rstrip(b"\r\n")]
    while line := stream.readline().rstrip(b"\r\n"):  # type: ignore[attr-defined]
        lines.append(line)
    pairs = [line.decode("latin-1").split(":", 1) for line in lines[1:]]
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    if headers.get("expect", "").lower() == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = b"".join(_raw_chunks(stream))
    else:
        body = stream.read(int(headers.get("content-length", 0)))  # type: ignore[attr-defined]
    method, target, _ = first.decode("latin-1").split(" ", 2)
    kept = [line for line in lines if not line.lower().startswith((b"expect:", b"connection:"))]
    return Request(method=method, target=target, headers=headers, head=b"\r\n".join(kept), body=body)


def _raw_chunks(stream: object) -> Iterator[bytes]:
    """A chunked body with its framing and trailers."""
    while True:
        line = stream.readline()  # type: ignore[attr-defined]
        yield line
        size = int(line.split(b";")[0], 16)
        if not size:
            break
        yield stream.read(size + 2)  # type: ignore[attr-defined]
    while trailer := stream.readline():  # type: ignore[attr-defined]
        yield trailer
        if trailer == b"\r\n":
            return


@contextlib.contextmanager
def fault_proxy(backend: tuple[str, int]) -> Iterator[FaultProxy]:
    """A proxy that runs as long as the block."""
    proxy = FaultProxy(backend)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join()


# --- Rules: which requests ------------------------------------------------------------------------


def undisturbed(request: Request, number: int) -> Act | None:
    return None


def at(number: int, act: Act) -> Rule:
    """One request, counted from 0."""
    return lambda _, seen: act if seen == number else None


def from_on(number: int, act: Act) -> Rule:
    """This request and all after it."""
    return lambda _, seen: act if seen >= number else None


@dataclass(slots=True)
class first_time:  # noqa: N801 (reads as a rule beside the others)
    """Every request when it comes for the first time."""

    act: Act
    seen: set[tuple[str, ...]] = field(default_factory=set)

    def __call__(self, request: Request, number: int) -> Act | None:
        if request.identity in self.seen:
            return None
        self.seen.add(request.identity)
        return self.act


@dataclass(slots=True)
class matching:  # noqa: N801
    """Requests of a method whose key holds a text: after `skip` of them, `times` of them; or for ever."""

    method: str
    text: str
    act: Act
    skip: int = 0
    times: int = 10**9

    def __call__(self, request: Request, number: int) -> Act | None:
        if request.method != self.method or self.text not in request.key:
            return None
        if self.skip:
            self.skip -= 1
            return None
        self.times -= 1
        return self.act if self.times >= 0 else None


# --- Acts: how a server fails ---------------------------------------------------------------------


def passed_on(exchange: Exchange) -> None:
    exchange.send(exchange.forward())


def error(status: int, code: str) -> Act:
    """An error of S3; as S3 does, without a body where HEAD asked."""
    xml = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{code}</Message></Error>'
    headers = (("Content-Type", "application/xml"),)

    def act(exchange: Exchange) -> None:
        body = b"" if exchange.request.method == "HEAD" else xml.encode()
        exchange.send(Answer(status=status, headers=headers, body=body))

    return act


slow_down = error(503, "SlowDown")
internal_error = error(500, "InternalError")
expired_token = error(400, "ExpiredToken")
access_denied = error(403, "AccessDenied")
no_such_bucket = error(404, "NoSuchBucket")


def reset(exchange: Exchange) -> None:
    """Nothing is done, nothing is said."""
    exchange.reset()


def lost_answer(exchange: Exchange) -> None:
    """The request is done, and nobody hears of it."""
    exchange.forward()
    exchange.reset()


def half_answer(exchange: Exchange) -> None:
    """The request is done; half the body comes, half the head where there is no body."""
    answer = exchange.forward()
    whole = answer.to_bytes()
    half = len(whole) - len(answer.body) + len(answer.body) // 2 if answer.body else len(whole) // 2
    exchange.client.sendall(whole[:half])
    exchange.reset()


def trickled(exchange: Exchange) -> None:
    """The body comes in pieces, each a moment after the other."""
    whole = exchange.forward().to_bytes()
    step = len(whole) // 8 + 1
    for start in range(0, len(whole), step):
        exchange.client.sendall(whole[start : start + step])
        time.sleep(0.002)


def cut_short(exchange: Exchange) -> None:
    """Half the body under a length that says that this is all: a lie that HTTP cannot notice."""
    answer = exchange.forward()
    headers = _without(answer, "content-length", "x-amz-checksum-")
    exchange.send(replace(answer, headers=headers, body=answer.body[: len(answer.body) // 2]))


def shrunk(exchange: Exchange) -> None:
    """HEAD tells of half the size."""
    answer = exchange.forward()
    size = int(next(value for name, value in answer.headers if name.lower() == "content-length"))
    headers = (*_without(answer, "content-length"), ("Content-Length", str(size // 2)))
    exchange.send(replace(answer, headers=headers))


def flipped(exchange: Exchange) -> None:
    """One bit of the body is wrong; its checksum is told where there is one."""
    answer = exchange.forward()
    body = bytearray(answer.body)
    if body:
        body[len(body) // 2] ^= 1
    exchange.send(replace(answer, body=bytes(body)))


def heedless(exchange: Exchange) -> None:
    """Passed on without its If-Match, as by a server that knows none."""
    lines = exchange.request.head.split(b"\r\n")
    kept = b"\r\n".join(line for line in lines if not line.lower().startswith(b"if-match:"))
    request = replace(exchange.request, head=kept)
    passed_on(replace(exchange, request=request))


def _without(answer: Answer, *prefixes: str) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in answer.headers if not pair[0].lower().startswith(prefixes))


def not_applied(exchange: Exchange) -> None:
    """200, and nothing is stored."""
    tag = md5(exchange.request.body).hexdigest()
    body = f"<CopyObjectResult><ETag>{tag}</ETag></CopyObjectResult>" if exchange.request.is_copy else ""
    exchange.send(Answer(status=200, headers=(("ETag", f'"{tag}"'),), body=body.encode()))


def hanging(exchange: Exchange) -> None:
    """No answer before the client goes away."""
    exchange.client.settimeout(30)
    exchange.client.recv(1)
    exchange.reset()


def stalled(exchange: Exchange) -> None:
    """Half the body, and no more before the client goes away; no answer where there is no body."""
    answer = exchange.forward()
    if answer.body:
        whole = answer.to_bytes()
        exchange.client.sendall(whole[: len(whole) - len(answer.body) // 2])
    hanging(exchange)


def after(change: Callable[[], object], act: Act = passed_on) -> Act:
    """Something happens behind the client's back, then the act."""

    def changed(exchange: Exchange) -> None:
        change()
        act(exchange)

    return changed
