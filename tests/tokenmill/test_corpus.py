"""Which files are read, which are passed over and counted, and how they are cut into shards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outputs import write_files

from tokenmill.corpus import (
    Corpus,
    Slice,
    SourceFile,
    find_corpus,
    group_slices,
    kind_suffix,
    without_output,
)
from tokenmill.errors import ConfigError, InputNotFoundError
from tokenmill.job import InputSpec
from tokenmill.store import StorageConfig, Store


def found(uri: str | list[str], **options) -> Corpus:
    return find_corpus(InputSpec(uri=uri, **options), StorageConfig())


def names(corpus: Corpus) -> list[str]:
    return [Path(file.uri).name for file in corpus.files]


FILES = {"b.jsonl": "{}", "a.txt": "x", "sub/c.csv.gz": b"", "d.parquet": b""}


def test_a_folder_is_read_in_order_of_names_whatever_its_depth(tmp_path: Path) -> None:
    folder = write_files(tmp_path, FILES)
    corpus = found(str(folder))
    assert names(corpus) == ["a.txt", "b.jsonl", "d.parquet", "c.csv.gz"]
    assert [(f.format, f.compression) for f in corpus.files] == [
        ("text", None),
        ("jsonl", None),
        ("parquet", None),
        ("csv", "gzip"),
    ]
    assert corpus.skipped == {}
    assert found(str(folder) + "/") == corpus


def test_hidden_and_unknown_files_are_passed_over_and_counted(tmp_path: Path) -> None:
    hidden = {"_SUCCESS": "", ".x.txt": "", "_year/a.txt": "", "s/_b.parquet": "", "s/.DS_Store": ""}
    folder = write_files(tmp_path, {**FILES, **hidden, "README.rst": "", "noname": "", "a.txt._COPYING_": ""})
    corpus = found(str(folder))
    assert names(corpus) == ["a.txt", "b.jsonl", "d.parquet", "c.csv.gz"]
    assert corpus.skipped == {"hidden (name begins with . or _)": 5, "of unknown kind": 3}


@pytest.mark.parametrize("name", ["_b.txt", ".hidden.txt", "_dir/a.txt"])
def test_a_hidden_file_that_is_named_is_read(tmp_path: Path, name: str) -> None:
    folder = write_files(tmp_path, {name: "x"})
    assert names(found(str(folder / name))) == [Path(name).name]


def test_a_hidden_folder_that_is_named_is_read(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"_dir/a.txt": "x"})
    assert names(found(str(folder / "_dir"))) == ["a.txt"]


def test_links_to_files_are_read_and_what_is_no_file_is_counted(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"a.txt": "x", "sub/b.txt": "y"})
    (folder / "c.txt").symlink_to(folder / "a.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "linked.parquet").symlink_to(folder / "sub")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.txt")
    corpus = found(str(folder))
    assert names(corpus) == ["a.txt", "c.txt", "b.txt"]
    assert corpus.skipped == {"no file (a broken link, a linked folder or a pipe)": 4}


def test_a_folder_that_cannot_be_listed_is_an_error_not_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_files(tmp_path, FILES)
    listed = os.scandir

    def refusing(path: str):
        if str(path).endswith("/sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputNotFoundError, match=r"in/sub: cannot be listed: Permission denied"):
        found(str(folder))


def test_globs_take_what_they_match(tmp_path: Path) -> None:
    folder = write_files(tmp_path, FILES)
    assert names(found(f"{folder}/*.jsonl")) == ["b.jsonl"]
    assert names(found(f"{folder}/**/*.gz")) == ["c.csv.gz"]
    assert names(found(f"{folder}/[ab].*")) == ["a.txt", "b.jsonl"]
    write_files(tmp_path, {"x.bin": "", "_SUCCESS": ""})
    corpus = found(f"{folder}/*")
    assert (names(corpus), corpus.skipped) == (["a.txt", "b.jsonl", "d.parquet"], {"of unknown kind": 2})
    with pytest.raises(InputNotFoundError, match=r"no file that tokenmill reads .*1 of unknown kind"):
        found(f"{folder}/*.bin")
    with pytest.raises(InputNotFoundError, match="no file matches"):
        found(f"{folder}/*.nothing")


@pytest.mark.parametrize(
    "name",
    [
        "a[1].txt",
        "a*.txt",
        "what?.txt",
        "a b.txt",
        "a#1.txt",
        "100%20.txt",
        "a::b.txt",
        "c:d+e.txt",
        "{x}.txt",
    ],
)
def test_a_name_that_exists_is_literal(tmp_path: Path, name: str) -> None:
    folder = write_files(tmp_path, {name: "x", "a1.txt": "y", "ab.txt": "z"})
    corpus = found(str(folder / name))
    assert [file.uri for file in corpus.files] == [str(folder / name)]
    inside = write_files(tmp_path / "t", {f"{name}.d/b.txt": "x"})
    assert names(found(str(inside / f"{name}.d"))) == ["b.txt"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    folder = write_files(tmp_path, FILES)
    again = [str(folder), str(folder / "a.txt"), f"{folder}/*.txt", f"{folder}/./sub/../a.txt"]
    assert names(found(again)) == names(found(str(folder)))


def test_a_relative_path_and_a_file_url_name_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_files(tmp_path, FILES)
    monkeypatch.chdir(folder)
    assert found("a.txt") == found(f"file://{folder}/a.txt") == found(str(folder / "a.txt"))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputNotFoundError, match=r"input\.uri: .*missing does not exist"):
        found(str(tmp_path / "missing"))
    with pytest.raises(InputNotFoundError, match="an empty list"):
        found([])
    write_files(tmp_path, {"_only": "", "x.bin": ""})
    with pytest.raises(
        InputNotFoundError, match=r"no file that tokenmill reads .*1 hidden.*1 of unknown kind"
    ):
        found(str(tmp_path / "in"))


def test_an_explicit_file_of_unknown_kind_asks_for_its_format(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"data.xyz": "x"})
    with pytest.raises(ConfigError, match=r"cannot tell the format of .*data\.xyz.*set input\.format"):
        found(str(folder / "data.xyz"))
    assert found(str(folder / "data.xyz"), format="text").files[0].format == "text"


def test_a_format_that_is_set_holds_for_all_files(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"a.txt": "x", "b.bin": "y", "_c.txt": "z"})
    corpus = found(str(folder), format="jsonl")
    assert [file.format for file in corpus.files] == ["jsonl", "jsonl"]
    assert corpus.skipped == {"hidden (name begins with . or _)": 1}


def test_a_changed_file_has_another_version(tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"a.txt": "one"})
    before = found(str(folder)).files[0]
    (folder / "b").write_text("two")
    (folder / "b").rename(folder / "a.txt")
    after = found(str(folder)).files[0]
    assert (before.uri, before.size_bytes) == (after.uri, after.size_bytes)
    assert before.version != after.version


def test_files_on_other_file_systems_keep_their_names() -> None:
    store = Store.open("memory://corpus-test")
    for name in ["a#1.txt", "b%20 c.txt", "_x.txt"]:
        store.write_bytes(f"in/{name}", b"x")
    corpus = found("memory://corpus-test/in")
    assert [file.uri for file in corpus.files] == [
        "memory:///corpus-test/in/a#1.txt",
        "memory:///corpus-test/in/b%20 c.txt",
    ]
    assert corpus.skipped == {"hidden (name begins with . or _)": 1}


def test_an_unknown_kind_of_storage_is_a_mistake_in_the_job() -> None:
    with pytest.raises(ConfigError, match="nowhere://x: cannot be opened"):
        found("nowhere://x")


def test_the_jobs_own_output_is_not_part_of_its_input(tmp_path: Path) -> None:
    folder = write_files(
        tmp_path, {**FILES, "out/results/p.parquet": b"", "out/job.json": "{}", "out2/x.txt": ""}
    )
    corpus = without_output(found(str(folder)), f"{folder}/out/")
    assert names(corpus) == ["a.txt", "b.jsonl", "d.parquet", "x.txt", "c.csv.gz"]
    assert corpus.skipped == {"in the job's own output": 2}
    with pytest.raises(InputNotFoundError, match="every file lies in the job's own output"):
        without_output(found(f"{folder}/out/results"), f"{folder}/out")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("dir/a.TSV.gz", ".tsv"),
        ("a.b.csv", ".csv"),
        ("x.tsv/a", ""),
        ("a.gz", ""),
        (".txt", ""),
        ("a.zst", ""),
    ],
)
def test_the_suffix_that_tells_the_kind(name: str, suffix: str) -> None:
    assert kind_suffix(name) == suffix


# --- Shards ---


def piece(name: str, size: int, first_group: int | None = None) -> Slice:
    file = SourceFile(uri=name, size_bytes=size, version="v", format="text", compression=None)
    return Slice(file=file, first_group=first_group, num_groups=first_group and 1, text_bytes=size)


pieces = st.lists(
    st.tuples(st.text("abc/", min_size=1, max_size=4), st.integers(0, 30)),
    unique_by=lambda t: t[0],
    max_size=40,
).map(lambda pairs: [piece(name, size) for name, size in sorted(pairs)])


@given(pieces, st.integers(1, 40))
def test_shards_are_the_corpus_in_order_and_bounded(slices: list[Slice], shard_bytes: int) -> None:
    shards = list(group_slices(slices, shard_bytes))
    assert [s for shard in shards for s in shard] == slices
    assert all(len(shard) == 1 or sum(s.text_bytes for s in shard) <= shard_bytes for shard in shards)
    assert list(group_slices(slices, shard_bytes)) == shards


def test_a_file_that_is_added_moves_few_borders() -> None:
    corpus = [piece(f"file-{number:05d}.txt", 10) for number in range(2000)]
    before = {tuple(shard) for shard in group_slices(corpus, 400)}
    for place in range(0, 2000, 97):
        added = sorted([*corpus, piece(f"file-{place:05d}x.txt", 10)], key=lambda s: s.file.uri)
        changed = [shard for shard in group_slices(added, 400) if shard not in before]
        assert 1 <= len(changed) <= 8
