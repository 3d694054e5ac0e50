"""Input over HTTP, from servers as they are: with ranges and without, silent, failing, encoding."""

from __future__ import annotations

import functools
import gzip
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from outputs import jsonl, published, read_all, run_fake, write_files

from tokenmill.corpus import SourceFile, find_corpus
from tokenmill.errors import ConfigError, DataError, InputNotFoundError, StoreError, StoreUnavailableError
from tokenmill.job import InputSpec
from tokenmill.plan import Plan
from tokenmill.store import StorageConfig, Store, open_filesystem
from tokenmill.testing import make_job, make_run

TEXTS = [f"row {n} of the corpus" for n in range(2000)]
LINES = jsonl(TEXTS).encode()


def table_bytes(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=500)
    return sink.getvalue()


@dataclass(kw_only=True)
class Server:
    """What is served, and how. `seen` are the requests, with their ranges."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tells_size: bool = True
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"v1"'})
    status: int | None = None
    cut: int = 0
    moved: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    """Answers GET as the server's `told` says."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        told: Server = self.server.told
        wanted = self.headers["Range"]
        told.seen.append((self.path, wanted))
        data = told.files.get(self.path)
        if self.path in told.moved:
            self._answer(302, {"Location": told.moved[self.path]})
        elif self.headers["Authorization"] != told.token:
            self.send_error(401)
        elif told.status or data is None:
            self.send_error(told.status or 404)
        elif told.ranges and wanted:
            first, last = map(int, re.findall(r"\d+", wanted))
            self._answer_range(data, first, data[first : last + 1])
        else:
            size = {"Content-Length": str(len(data))} if told.tells_size else {}
            self._answer(200, {**size, **told.headers}, data)

    def _answer_range(self, data: bytes, first: int, part: bytes) -> None:
        told: Server = self.server.told
        status, place = (206, f"{first}-{first + len(part) - 1}") if part else (416, "*")
        body = part[: len(part) - told.cut] if len(part) > 1 else part
        about = {"Content-Range": f"bytes {place}/{len(data)}", "Content-Length": str(len(body))}
        self._answer(status, {**about, **told.headers}, body)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class QuietServer(ThreadingHTTPServer):
    told: Server

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away early is no error."""


@contextmanager
def serving(server: QuietServer) -> Iterator[str]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    quiet = QuietServer(("127.0.0.1", 0), Handler)
    quiet.told = Server(files={"/a.jsonl": LINES})
    with serving(quiet) as url:
        quiet.told.url = url
        yield quiet.told


def files_of(uri: str, **options: object) -> list[SourceFile]:
    return list(find_corpus(InputSpec(uri=uri, **options), StorageConfig()).files)


def texts_of(uri: str) -> list[str]:
    return [text for batch in read_all(InputSpec(uri=uri)) for text in batch.texts]


def plan_of(tmp_path: Path, uri: str) -> Plan:
    return make_run(make_job(tmp_path, input={"uri": uri})).plan()


def test_a_file_is_listed_with_its_size_and_version(server: Server) -> None:
    (file,) = files_of(f"{server.url}/a.jsonl")
    assert (file.uri, file.size_bytes, file.version) == (f"{server.url}/a.jsonl", len(LINES), "etag:v1")
    server.headers = {"Last-Modified": "Tue, 01 Dec 2026 10:00:00 GMT"}
    (file,) = files_of(f"{server.url}/a.jsonl")
    assert file.version == "lastmodified:Tue, 01 Dec 2026 10:00:00 GMT"
    server.headers = {}
    assert files_of(f"{server.url}/a.jsonl")[0].version == "unknown"


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("/a.jsonl", LINES),
        ("/a.jsonl.gz", gzip.compress(LINES)),
        ("/a.txt", "\n".join(TEXTS).encode()),
        ("/a.csv", "\n".join(["text", *TEXTS]).encode()),
        ("/a.parquet", table_bytes(TEXTS)),
    ],
)
def test_rows_are_those_of_the_file_with_ranges_and_without(
    server: Server, ranges: bool, name: str, data: bytes
) -> None:
    server.files[name] = data
    server.ranges = ranges
    assert texts_of(server.url + name) == TEXTS


@pytest.mark.parametrize("ranges", [True, False])
def test_a_job_over_http_publishes_what_a_local_one_does(
    server: Server, tmp_path: Path, ranges: bool
) -> None:
    server.files["/b.parquet"] = table_bytes(TEXTS)
    server.ranges = ranges
    names = ["a.jsonl", "b.parquet"]
    local = write_files(tmp_path, {name: server.files[f"/{name}"] for name in names})
    web_job = make_job(tmp_path / "web", input={"uri": [f"{server.url}/{n}" for n in names]})
    local_job = make_job(tmp_path / "local", input={"uri": [str(local / name) for name in names]})
    assert run_fake(web_job).counts == run_fake(local_job).counts
    web, here = published(web_job), published(local_job)
    assert [row["embedding"] for row in web] == [row["embedding"] for row in here]
    assert {row["source_file"] for row in web} == {f"{server.url}/{name}" for name in names}


def test_only_the_parts_that_are_read_are_asked_for(server: Server) -> None:
    server.files["/big.jsonl"] = LINES * 200
    fs, path = open_filesystem(f"{server.url}/big.jsonl", StorageConfig())
    with fs.open(path, "rb", block_size=1 << 20) as file:
        file.seek(len(LINES) * 100)
        assert file.read(10) == LINES[:10]
    start = len(LINES) * 100
    assert [wanted for _, wanted in server.seen] == [
        "bytes=0-0",
        f"bytes={start}-{start + 10 + (1 << 20) - 1}",
    ]


def test_pythons_own_server_is_read(tmp_path: Path) -> None:
    class Simple(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    folder = write_files(tmp_path, {"a b.jsonl": LINES, "c.parquet": table_bytes(TEXTS), "empty.txt": ""})
    handler = functools.partial(Simple, directory=folder)
    with serving(QuietServer(("127.0.0.1", 0), handler)) as url:
        for name in ("a%20b.jsonl", "a b.jsonl", "c.parquet"):
            assert texts_of(f"{url}/{name}") == TEXTS
        assert texts_of(f"{url}/empty.txt") == []
        assert files_of(f"{url}/c.parquet")[0].version.startswith("lastmodified:")


@pytest.mark.parametrize("ranges", [True, False])
def test_an_empty_file_has_no_rows(server: Server, ranges: bool) -> None:
    server.files["/empty.jsonl"] = b""
    server.ranges = ranges
    assert texts_of(f"{server.url}/empty.jsonl") == []


def test_a_size_that_is_not_told_is_an_error(server: Server) -> None:
    server.ranges = server.tells_size = False
    with pytest.raises(StoreError, match=r"a\.jsonl: the server does not tell its size; download the file"):
        files_of(f"{server.url}/a.jsonl")


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (404, InputNotFoundError, r"input\.uri: .*/a\.jsonl\?x=1 does not exist"),
        (410, InputNotFoundError, r"input\.uri: .*/a\.jsonl\?x=1 does not exist"),
        (401, StoreError, r"access is refused \(HTTP 401\)"),
        (403, StoreError, r"access is refused \(HTTP 403\); check the credentials and rights"),
        (400, StoreError, r"listing .*/a\.jsonl\?x=1: HTTP 400 Bad Request"),
        (429, StoreUnavailableError, "HTTP 429 Too Many Requests"),
        (500, StoreUnavailableError, "HTTP 500 Internal Server Error"),
        (503, StoreUnavailableError, "HTTP 503 Service Unavailable"),
    ],
)
def test_an_answer_that_is_no_file_is_the_right_error(
    server: Server, status: int, kind: type[Exception], message: str
) -> None:
    server.status = status
    with pytest.raises(kind, match=message) as caught:
        files_of(f"{server.url}/a.jsonl?x=1")
    assert type(caught.value) is kind


def test_an_error_while_reading_is_retried(server: Server, tmp_path: Path) -> None:
    run = make_run(make_job(tmp_path, input={"uri": f"{server.url}/a.jsonl"}))
    (shard,) = run.plan().shards
    server.status = 500
    with pytest.raises(StoreUnavailableError, match=r"reading .*a\.jsonl: HTTP 500"):
        run.tokenize(shard)


def test_a_short_range_is_never_taken_for_the_end(server: Server) -> None:
    server.cut = 7
    with pytest.raises(StoreUnavailableError, match=r"a\.jsonl: HTTP 206 with \d+ bytes for the range 0-"):
        texts_of(f"{server.url}/a.jsonl")


def test_a_server_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(StoreUnavailableError, match=r"listing http://127\.0\.0\.1:9/a\.jsonl: ClientConn"):
        files_of("http://127.0.0.1:9/a.jsonl")


def test_a_changed_file_is_noticed(server: Server, tmp_path: Path) -> None:
    uri = f"{server.url}/a.jsonl"
    run = make_run(make_job(tmp_path, input={"uri": uri}))
    plan = run.plan()
    server.headers = {"ETag": '"v2"'}
    with pytest.raises(DataError, match="changed while the job ran"):
        run.tokenize(plan.shards[0])
    assert run.plan().keys_of("tokenize") != plan.keys_of("tokenize")


@pytest.mark.parametrize(
    "name", ["/get.jsonl?id=1&x=a/b.txt", "/a%20%2Fb%41.jsonl", "/a+b.jsonl?q=%2B+%20", "/x=1/a.jsonl?y=2/z"]
)
def test_a_url_is_literal_and_its_path_tells_the_format(server: Server, name: str) -> None:
    server.files[name] = LINES
    (file,) = files_of(server.url + name)
    assert (file.uri, file.format) == (server.url + name, "jsonl")
    assert texts_of(file.uri) == TEXTS
    assert {path for path, _ in server.seen} == {name}


def test_what_no_url_may_hold_is_quoted(server: Server) -> None:
    server.files["/%C3%BC%20b.jsonl"] = LINES
    assert texts_of(f"{server.url}/ü b.jsonl") == TEXTS


def test_the_query_tells_no_compression_and_no_partition(server: Server) -> None:
    server.files["/year=2020/a.jsonl?lang=de/x.gz"] = LINES
    uri = f"{server.url}/year=2020/a.jsonl?lang=de/x.gz"
    assert files_of(uri)[0].compression is None
    (batch, *_) = read_all(InputSpec(uri=uri, keep=["year"]))
    assert batch.columns.column("year")[0].as_py() == "2020"


@pytest.mark.parametrize("name", ["/", "/docs/", "/*.jsonl", "/[ab].jsonl"])
def test_folders_and_globs_are_refused_without_a_request(server: Server, name: str) -> None:
    with pytest.raises(ConfigError, match="HTTP has no listings of folders; name each file"):
        files_of(server.url + name)
    assert server.seen == []


def test_a_missing_file_with_a_query_is_no_glob(server: Server) -> None:
    with pytest.raises(InputNotFoundError, match="does not exist"):
        files_of(f"{server.url}/no.jsonl?x=*")
    assert len(server.seen) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_compressed_file_is_read_as_it_lies_there(server: Server, ranges: bool) -> None:
    """Servers send .gz files with Content-Encoding: gzip, which clients take off."""
    server.files["/a.jsonl.gz"] = gzip.compress(LINES)
    server.ranges = ranges
    server.headers["Content-Encoding"] = "gzip"
    assert texts_of(f"{server.url}/a.jsonl.gz") == TEXTS
    assert files_of(f"{server.url}/a.jsonl.gz")[0].size_bytes == len(gzip.compress(LINES))


def test_a_plain_file_that_is_encoded_on_the_way_is_refused(server: Server) -> None:
    server.headers["Content-Encoding"] = "gzip"
    with pytest.raises(StoreError, match=r"a\.jsonl: the server encodes it \(gzip\) unasked"):
        files_of(f"{server.url}/a.jsonl")


def test_redirects_are_followed_and_their_signed_targets_not_told(server: Server) -> None:
    server.files["/signed?sig=hunter2"] = LINES
    server.moved["/a.jsonl"] = "/signed?sig=hunter2"
    (file,) = files_of(f"{server.url}/a.jsonl")
    assert file.uri == f"{server.url}/a.jsonl"
    assert texts_of(file.uri) == TEXTS
    del server.files["/signed?sig=hunter2"]
    server.status = 403
    with pytest.raises(StoreError, match="access is refused") as caught:
        texts_of(file.uri)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("ranges", [True, False])
def test_credentials_come_from_the_configuration_of_fsspec(
    server: Server, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ranges, server.token = ranges, "Bearer hunter2"
    with pytest.raises(StoreError, match=r"access is refused \(HTTP 401\)"):
        files_of(f"{server.url}/a.jsonl")
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"Authorization": "Bearer hunter2"}})
    assert texts_of(f"{server.url}/a.jsonl") == TEXTS


def test_credentials_come_from_netrc(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "Basic bWU6aHVudGVyMg=="
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert texts_of(f"{server.url}/a.jsonl") == TEXTS


def test_an_output_over_http_is_refused_before_any_work(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HTTP can be read only; an output is a folder or in a bucket"):
        Store.open(f"{server.url}/out")
    with pytest.raises(ConfigError, match="HTTP can be read only"):
        make_run(make_job(tmp_path, output={"uri": f"{server.url}/out"}))
    assert server.seen == []
