"""What a URI says before anything is opened. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

BUCKETS = ("s3", "s3a")
WEB = ("http", "https")
CLOUDS: Mapping[str, str] = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
EXTRAS: Mapping[str, str] = {**CLOUDS, **dict.fromkeys(WEB, "http")}
PACKAGES: Mapping[str, str] = {"gcs": "gcsfs", "azure": "adlfs", "http": "aiohttp"}  # by extra


def protocol_of(uri: str) -> str:
    """Example: "s3://b/a.parquet" -> "s3"; "in/a.parquet" -> "file" """
    return uri.partition("://")[0] if "://" in uri else "file"


def is_bucket(uri: str) -> bool:
    """Whether the settings of a storage section apply to it."""
    return protocol_of(uri) in BUCKETS


def is_web(uri: str) -> bool:
    return protocol_of(uri) in WEB


def path_of(uri: str) -> str:
    """The URI without the query and fragment of a web address: what its file's name is told from.

    Example: "https://h/a.csv?v=b.txt" -> "/a.csv"; "s3://b/a?.csv" as it is
    """
    return urlsplit(uri).path if is_web(uri) else uri
