"""An input file that changes while it is read: rows of the planned version, or an error; never a mixture.

Servers that answer with fewer bytes than they hold are in test_faults.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.corpus import Slice, find_corpus
from tokenmill.errors import DataError, StoreUnavailableError
from tokenmill.job import InputSpec
from tokenmill.readers import read_slice
from tokenmill.store import StorageConfig

OLD, NEW = (b"%s\n" % (word * 250) * 10_000 for word in (b"old ", b"new "))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "c.txt"
    path.write_bytes(OLD)
    return path


def planned(path: Path) -> tuple[Slice, InputSpec, StorageConfig]:
    spec, storage = InputSpec(uri=str(path)), StorageConfig()
    (file,) = find_corpus(spec, storage).files
    return Slice(file=file, text_bytes=file.size_bytes), spec, storage


def begun(path: Path) -> tuple[list[str], Iterator[list[str]]]:
    """The first texts of the file, and the others, not read yet."""
    rest = (batch.texts for batch in read_slice(*planned(path)))
    return next(rest), rest


def test_a_file_that_is_written_over_while_it_is_read_is_told(path: Path) -> None:
    _, rest = begun(path)
    with path.open("r+b") as file:
        file.write(NEW)
    with pytest.raises(DataError, match=r"c\.txt: changed while the job ran"):
        list(rest)


def test_a_file_that_grows_while_it_is_read_is_told(path: Path) -> None:
    _, rest = begun(path)
    with path.open("ab") as file:
        file.write(NEW)
    with pytest.raises(DataError, match=r"c\.txt: changed while the job ran"):
        list(rest)


def test_a_file_that_shrinks_while_it_is_read_is_told(path: Path) -> None:
    _, rest = begun(path)
    os.truncate(path, 100)
    with pytest.raises(StoreUnavailableError, match=rf"c\.txt: \d+ of {len(OLD)} bytes came"):
        list(rest)


def test_a_file_that_is_replaced_while_it_is_read_stays_what_it_was(path: Path) -> None:
    """A new file under the same name does not touch the one that is open."""
    found, rest = begun(path)
    before = planned(path)
    new = path.with_suffix(".new")
    new.write_bytes(NEW)
    new.replace(path)
    for texts in rest:
        found += texts
    assert found == OLD.decode().splitlines()
    with pytest.raises(DataError, match="changed while the job ran"):
        next(read_slice(*before))
