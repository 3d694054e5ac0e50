"""What the tests of S3 share: a bucket, odd names for keys, a job with input and output in it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pyarrow.parquet as pq
import pytest
from ceph_gateway import KEY, SECRET
from outputs import jsonl

from tokenmill.job import Job
from tokenmill.manifest import read_manifest
from tokenmill.store import StorageConfig, Store
from tokenmill.testing import make_job

BUCKET = "corpus"
UMLAUT = unicodedata.normalize("NFC", "ü")
ODD_MARKS = (
    *("#", "%", "%2F", "?", "+", " ", "  ", "&", "&amp;", "=", ";", ":", "::", "*", "**", "[", "[a]", "{a}"),
    *("'", '"', "\\", "<|>", "`~$^@!,(", "\t", "\u00a0\u200b", "漢字", "🦆"),
    *(UMLAUT, unicodedata.normalize("NFD", UMLAUT)),
)
FILES = {
    "a#1.jsonl": jsonl([{"text": "one two", "k": "x"}, {"text": "three", "k": None}]) + "{bad\n",
    "b%2F c+d.csv": 'text,k\n"multi\nline",y\nsecond,z\n',
    "c d/e?f[1]*.jsonl": jsonl([{"text": "deep", "k": "x"}]),
}


@contextmanager
def empty_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a new bucket, which goes afterwards; the environment holds the keys."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    fsspec.filesystem("s3").clear_instance_cache()
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=BUCKET)
    try:
        yield client
    finally:
        left = keys(client)
        for batch in (left[start : start + 1000] for start in range(0, len(left), 1000)):
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in batch]})
        client.delete_bucket(Bucket=BUCKET)
        client.close()


def keys(client: Any) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))


def job_at(
    folder: Path,
    storage: dict[str, Any] | None,
    input_uri: str | list[str],
    output_uri: str,
    shard_bytes: int = 1,
) -> Job:
    def place(uri: str | list[str]) -> dict[str, Any]:
        in_bucket = storage is not None and "s3://" in str(uri)
        return {"uri": uri, **({"storage": storage} if in_bucket else {})}

    return make_job(
        folder,
        input={"keep": ["k"], "shard_bytes": shard_bytes, **place(input_uri)},
        output=place(output_uri),
        aggregate={"group_by": ["k"]},
        quality={"max_reject_rate": 0.5},
    )


def store_of(job: Job) -> Store:
    return Store.open(job.output.uri, StorageConfig.from_spec(job.output.storage))


def rows_of(job: Job) -> list[dict[str, Any]]:
    store = store_of(job)
    manifest = read_manifest(store)
    assert manifest is not None
    rows = []
    for file in manifest.results:
        with store.open_file(file.path) as opened:
            rows += pq.read_table(opened).to_pylist()
    return rows
