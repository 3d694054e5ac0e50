"""The demo corpus: what is taken from source files, and that the same sources give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tokenmill.docstrings import (
    SCHEMA,
    CorpusStats,
    Reading,
    SourceText,
    default_roots,
    find_sources,
    write_corpus,
)

MODULE = '''"""The module."""

import sys

class Shape:
    """A shape."""

    @property
    def size(self):
        """Size, read."""

    @size.setter
    def size(self, value):
        """Size, written."""

    def _hidden(self):
        """Not public."""

    class Part:
        """A part."""

        async def move(self):
            """
            Moves.

                indented
            """

if sys.platform == "linux":
    def here():
        """On Linux."""
else:
    def here():
        """Elsewhere."""

try:
    pass
except ImportError:
    def fallback():
        """Fallback."""

def bare():
    def inner():
        """Not reachable by name."""

def blank():
    """   """
'''


def lay_out(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def read(path: Path) -> list[dict[str, str]]:
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


def without_topics(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if row["kind"] != "topic"]


def test_documents_of_a_module(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"pkg/shapes.py": MODULE})
    source = SourceText(root=root, name="pkg/shapes.py", size_bytes=0)
    found = [(d.doc_id, d.kind, d.text) for d in Reading().documents_of(source)]
    assert found == [
        ("pkg.shapes", "module", "The module."),
        ("pkg.shapes:Shape", "class", "A shape."),
        ("pkg.shapes:Shape.size", "function", "Size, read."),
        ("pkg.shapes:Shape.size#2", "function", "Size, written."),
        ("pkg.shapes:Shape.Part", "class", "A part."),
        ("pkg.shapes:Shape.Part.move", "function", "Moves.\n\n    indented"),
        ("pkg.shapes:here", "function", "On Linux."),
        ("pkg.shapes:here#2", "function", "Elsewhere."),
        ("pkg.shapes:fallback", "function", "Fallback."),
    ]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("json/__init__.py", "json"),
        ("json/decoder.py", "json.decoder"),
        ("ast.py", "ast"),
        ("a/b/c.py", "a.b.c"),
    ],
)
def test_module_name(name: str, module: str) -> None:
    assert SourceText(root=Path(), name=name, size_bytes=0).module == module


def test_tests_vendored_copies_and_what_cannot_be_imported_are_left_out(tmp_path: Path) -> None:
    names = ["a.py", "pkg/b.py", "pkg/tests/c.py", "pkg/_vendor/d.py", "no-name/e.py", "site-packages/f.py"]
    root = lay_out(tmp_path, dict.fromkeys([*names, "g-h.py", "i.txt"], '"""Doc."""'))
    assert sorted(source.name for source in find_sources([root])) == ["a.py", "pkg/b.py"]


def test_order_of_files_depends_on_their_names_alone(tmp_path: Path) -> None:
    names = [f"m{number}.py" for number in range(50)]
    first = lay_out(tmp_path / "x", dict.fromkeys(names, ""))
    second = lay_out(tmp_path / "y", dict.fromkeys(reversed(names), ""))
    order = [source.name for source in find_sources([first])]
    assert order == [source.name for source in find_sources([second])]
    assert order != sorted(order)


def test_a_folder_that_is_twice_among_the_roots_counts_once(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"a.py": '"""Doc."""'})
    assert len(find_sources([root, root])) == 1


def test_unreadable_files_are_skipped_and_counted(tmp_path: Path) -> None:
    broken: dict[str, str | bytes] = {
        "syntax.py": "def (:",
        "null.py": b'"""Doc."""\x00',
        "coding.py": b"# coding: no-such\n",
        "bytes.py": b'"""\xff"""',
        "deep.py": "(" * 5000 + ")" * 5000,
    }
    root = lay_out(tmp_path / "in", {**broken, "good.py": '"""Good."""'})
    stats = write_corpus(tmp_path / "corpus.parquet", roots=[root])
    assert (stats.files_found, stats.files_read, stats.files_unreadable) == (6, 6, 5)
    assert [row["doc_id"] for row in without_topics(read(tmp_path / "corpus.parquet"))] == ["good"]


def test_other_peoples_warnings_stay_quiet(tmp_path: Path) -> None:
    root = lay_out(tmp_path / "in", {"a.py": '"""A \\d escape."""'})
    write_corpus(tmp_path / "corpus.parquet", roots=[root])  # pytest turns warnings into errors
    assert [row["text"] for row in without_topics(read(tmp_path / "corpus.parquet"))] == ["A \\d escape."]


def test_code_points_that_are_not_text_become_replacement_characters(tmp_path: Path) -> None:
    root = lay_out(tmp_path / "in", {"a.py": '"""Half \\ud800 a pair."""'})
    write_corpus(tmp_path / "corpus.parquet", roots=[root])
    assert [row["text"] for row in without_topics(read(tmp_path / "corpus.parquet"))] == [
        "Half \ufffd a pair."
    ]


def test_same_sources_give_the_same_bytes_and_equal_texts_stay(tmp_path: Path) -> None:
    root = lay_out(tmp_path / "in", {f"m{number}.py": '"""Same."""' for number in range(30)})
    for name in ("one", "two"):
        write_corpus(tmp_path / f"{name}.parquet", roots=[root])
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    rows = without_topics(read(tmp_path / "one.parquet"))
    assert [row["text"] for row in rows] == ["Same."] * 30
    assert len({row["doc_id"] for row in rows}) == 30


def test_a_corpus_of_the_same_sources_is_left_as_it_is(tmp_path: Path) -> None:
    root = lay_out(tmp_path / "in", {"a.py": '"""A."""'})
    path = tmp_path / "corpus.parquet"
    made = write_corpus(path, roots=[root])
    before = path.stat().st_mtime_ns
    again = write_corpus(path, roots=[root])
    assert (again.rows, again.reused, path.stat().st_mtime_ns) == (made.rows, True, before)
    lay_out(root, {"b.py": '"""B."""'})
    assert write_corpus(path, roots=[root]) == CorpusStats(
        rows=made.rows + 1, files_found=2, files_read=2, files_unreadable=0, reused=False
    )
    path.write_bytes(b"not Parquet")
    assert not write_corpus(path, roots=[root]).reused


def test_max_rows_stops_early_with_a_share_of_help_texts(tmp_path: Path) -> None:
    root = lay_out(tmp_path / "in", {f"m{number}.py": MODULE for number in range(40)})
    stats = write_corpus(tmp_path / "corpus.parquet", 100, roots=[root])
    rows = read(tmp_path / "corpus.parquet")
    assert (stats.rows, len(rows)) == (100, 100)
    assert len([row for row in rows if row["kind"] == "topic"]) == 5
    assert [row["kind"] for row in rows].index("topic") == 19
    assert stats.files_read == 11  # 95 documents, 9 in each file


def test_progress_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.docstrings.GROUP_ROWS", 40)
    root = lay_out(tmp_path / "in", {f"m{number}.py": MODULE for number in range(40)})
    seen: list[int] = []
    write_corpus(tmp_path / "corpus.parquet", 100, seen.append, roots=[root])
    metadata = pq.ParquetFile(tmp_path / "corpus.parquet").metadata
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert (seen, groups) == ([40, 80, 100], [40, 40, 20])


def test_no_sources_leave_the_help_texts(tmp_path: Path) -> None:
    stats = write_corpus(tmp_path / "corpus.parquet", 10, roots=[tmp_path / "absent"])
    assert stats.files_found == 0
    assert without_topics(read(tmp_path / "corpus.parquet")) == []
    assert pq.read_schema(tmp_path / "corpus.parquet").equals(SCHEMA)


def test_a_sample_of_this_environment_is_varied(tmp_path: Path) -> None:
    stats = write_corpus(tmp_path / "corpus.parquet", 300)
    rows = read(tmp_path / "corpus.parquet")
    assert stats.rows == len(rows) == 300
    assert len({row["doc_id"] for row in rows}) == 300
    assert len({row["package"] for row in rows}) >= 5
    assert {row["kind"] for row in rows} >= {"class", "function"}
    assert all(row["text"].strip() for row in rows)
    assert default_roots()
