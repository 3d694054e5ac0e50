"""A corpus that every machine has: the docstrings of its Python packages.

Source files are parsed, never imported. Left out: tests, vendored copies, private names, and
functions inside functions. Equal texts stay: they are legitimate rows. Beside docstrings there are
the language's own help texts (`pydoc_data.topics`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa

from tokenmill.errors import DataError, StoreError
from tokenmill.keys import fingerprint
from tokenmill.parquet import create_part, part_footer
from tokenmill.store import Store
from tokenmill.texts import printable

CORPUS_VERSION = 1
GROUP_ROWS = 1000  # rows of a row group: the smallest slice a job can cut the corpus into
TOPICS_MODULE = "pydoc_data.topics"
TOPICS_SHARE = 20  # one row in this many is a help text, as long as there are both
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "_vendor", "_vendored", "vendor"}
)

SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("package", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ]
)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One row. kind: module, class, function or topic.

    Example: doc_id "json.decoder:JSONDecoder.decode", package "json", kind "function"
    """

    doc_id: str
    package: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusStats:
    """What became of the environment. reused: the file was there already, made from the same sources."""

    rows: int
    files_found: int
    files_read: int
    files_unreadable: int
    reused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceText:
    """A Python source file. name: relative to the root, with slashes."""

    root: Path
    name: str
    size_bytes: int

    @property
    def module(self) -> str:
        """Dotted name, as in an import.  Example: json/__init__.py -> json"""
        parts = self.name.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def default_roots() -> tuple[Path, ...]:
    """Folders of the standard library and of the installed packages of this interpreter."""
    paths = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
    return tuple(dict.fromkeys(path.resolve() for path in paths if path.is_dir()))


def write_corpus(
    path: str | Path,
    max_rows: int | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
    roots: Sequence[Path] | None = None,
) -> CorpusStats:
    """One Parquet file of documents, the same bytes for the same environment.

    max_rows: stop after so many, taken from files all over the environment; None: all there are.
    on_progress: called with the rows so far, now and then.
    A file that is there already and was made from the same sources is left as it is.
    """
    path = Path(path)
    store = Store.open(str(path.parent.absolute()))
    sources = find_sources(default_roots() if roots is None else roots)
    made_from = _made_from(sources, max_rows)
    if path.is_file() and (rows := _rows_if_made_from(store, path.name, made_from)) is not None:
        return CorpusStats(rows=rows, files_found=len(sources), files_read=0, files_unreadable=0, reused=True)
    reading = Reading()
    wanted = documents(sources, max_rows, reading)
    with create_part(store, path.name, SCHEMA, made_from, group_rows=GROUP_ROWS) as part:
        rows = 0
        while block := list(islice(wanted, GROUP_ROWS)):
            part.write(_batch(block))
            rows += len(block)
            on_progress(rows)
    return CorpusStats(
        rows=rows,
        files_found=len(sources),
        files_read=reading.files_read,
        files_unreadable=reading.files_unreadable,
        reused=False,
    )


def _made_from(sources: Sequence[SourceText], max_rows: int | None) -> dict[str, str]:
    """Footer metadata that tells one environment from another."""
    files = [[source.name, source.size_bytes] for source in sources]
    settings = [CORPUS_VERSION, sys.version, max_rows]
    return {"made_from": fingerprint([settings, files])}


def _rows_if_made_from(store: Store, name: str, made_from: dict[str, str]) -> int | None:
    """Rows of a stored corpus if it was made from the same sources, else None."""
    try:
        schema, rows = part_footer(store, name)
    except (DataError, StoreError):  # damaged, or not ours: it is written anew
        return None
    stored = schema.metadata.get(b"tokenmill.made_from", b"").decode()
    return rows if stored == made_from["made_from"] else None


def _batch(block: Sequence[Document]) -> pa.RecordBatch:
    columns = ([getattr(document, f.name) for document in block] for f in SCHEMA)
    return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=SCHEMA)


# --- Finding source files ------------------------------------------------------------------------


def find_sources(roots: Sequence[Path]) -> list[SourceText]:
    """The importable modules below the roots, in an order that mixes all packages.

    The order is that of a hash of their names, so that it depends on nothing else and the first
    thousand files are a sample of all.
    """
    found = {source.name: source for root in roots for source in _walk(root, "")}
    return sorted(found.values(), key=lambda source: _shuffle_key(source.name))


def _shuffle_key(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _walk(root: Path, folder: str) -> Iterator[SourceText]:
    try:
        entries = list(os.scandir(root / folder))
    except OSError:  # a folder that this user may not list
        return
    for entry in entries:
        name = folder + entry.name
        if entry.is_dir(follow_symlinks=False):
            if entry.name.isidentifier() and entry.name not in LEFT_OUT:
                yield from _walk(root, f"{name}/")
        elif entry.name.endswith(".py") and entry.name[:-3].isidentifier() and entry.is_file():
            yield SourceText(root=root, name=name, size_bytes=entry.stat().st_size)


# --- Reading documents ---------------------------------------------------------------------------


@dataclass(slots=True)
class Reading:
    """Counts what was read. A second definition of a name gets a number, so that ids are unique.

    Example: a property's getter and setter -> "m:C.size", "m:C.size#2"
    """

    files_read: int = 0
    files_unreadable: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def documents_of(self, source: SourceText) -> list[Document]:
        """Documents of one file; none if it cannot be read or parsed, which is counted."""
        self.files_read += 1
        tree = _parse(source.root / source.name)
        if tree is None:
            self.files_unreadable += 1
            return []
        module = source.module
        found = [(module, "module", _docstring(tree)), *_members(tree, f"{module}:")]
        return [self._document(name, kind, text) for name, kind, text in found if text]

    def _document(self, name: str, kind: str, text: str) -> Document:
        self.seen[name] += 1
        number = self.seen[name]
        package = name.partition(":")[0].partition(".")[0]
        return Document(
            doc_id=name if number == 1 else f"{name}#{number}", package=package, kind=kind, text=text
        )


def documents(sources: Sequence[SourceText], max_rows: int | None, reading: Reading) -> Iterator[Document]:
    """Docstrings file by file, every twentieth row a help text; no more files are parsed than needed."""
    found = chain.from_iterable(reading.documents_of(source) for source in sources)
    return islice(_interleaved(found, _topics()), max_rows)


def _interleaved(many: Iterator[Document], few: Iterator[Document]) -> Iterator[Document]:
    while block := list(islice(many, TOPICS_SHARE - 1)):
        yield from block
        yield from islice(few, 1)
    yield from few


def _topics() -> Iterator[Document]:
    """The language's own help texts; none where the distribution leaves them out."""
    try:
        topics: dict[str, str] = importlib.import_module(TOPICS_MODULE).topics
    except ImportError:
        return
    package = TOPICS_MODULE.partition(".")[0]
    for name in sorted(topics, key=_shuffle_key):
        text = printable(topics[name].strip())
        yield Document(doc_id=f"{TOPICS_MODULE}:{name}", package=package, kind="topic", text=text)


def _parse(path: Path) -> ast.Module | None:
    """Syntax tree of a file, or None where it cannot be read or is not Python of this version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escapes
        try:
            return ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _docstring(node: ast.Module | Definition) -> str:
    return printable((ast.get_docstring(node) or "").strip())


def _members(node: ast.Module | Definition, prefix: str) -> Iterator[tuple[str, str, str]]:
    """(name, kind, text) of the public classes and functions of a module or class, in file order."""
    for child in _statements(node.body):
        if not isinstance(child, Definition) or child.name.startswith("_"):
            continue
        name = prefix + child.name
        is_class = isinstance(child, ast.ClassDef)
        yield name, "class" if is_class else "function", _docstring(child)
        if is_class:
            yield from _members(child, f"{name}.")


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a block, those of its `if` and `try` branches included."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)
            yield from _statements(statement.orelse)
        else:
            yield statement
