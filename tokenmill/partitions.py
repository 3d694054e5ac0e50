"""Hive partitions: columns that a file's folders hold, such as year=2020/lang=de/a.parquet. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from urllib.parse import unquote

from tokenmill.uris import path_of

NULL = "__HIVE_DEFAULT_PARTITION__"


def is_partition(folder: str) -> bool:
    """Whether a folder's name is a column and its value."""
    name, equals, _ = folder.partition("=")
    return bool(name and equals)


def partition_columns(uri: str, own: Iterable[str] = ()) -> dict[str, str | None]:
    """Values by column, as text and decoded once.  own: columns of the file itself, which win.

    Example: "s3://b/year=2020/city=A%20b/a.parquet" -> {"year": "2020", "city": "A b"}
    """
    path = path_of(uri)
    folders = PurePosixPath(path.partition("://")[2] or path).parent.parts
    pairs = (folder.partition("=") for folder in folders if is_partition(folder))
    values = {unquote(name): None if value == NULL else unquote(value) for name, _, value in pairs}
    taken = set(own)
    return {name: value for name, value in values.items() if name not in taken}
