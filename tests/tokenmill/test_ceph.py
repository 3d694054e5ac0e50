"""What moto does not do and Ceph's S3 gateway does: refuse keys, hold large uploads, issue session tokens.

All that is said in `test_s3` is tested against it too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import botocore.auth
import fsspec
import pytest
from buckets import BUCKET, FILES, empty_bucket, job_at, keys, store_of
from ceph_gateway import USER
from outputs import run_fake, write_files

from tokenmill.corpus import find_corpus
from tokenmill.errors import StoreError
from tokenmill.job import InputSpec, Job
from tokenmill.store import StorageConfig, Store
from tokenmill.verify import verify

pytestmark = pytest.mark.service

MIB = 2**20
REFUSED = r"the storage refuses the credentials \(\w+\); check key, secret, rights"


@pytest.fixture
def s3(ceph: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with empty_bucket(ceph, monkeypatch) as client:
        yield client


@pytest.fixture
def job(tmp_path: Path, s3: Any, ceph: str) -> Job:
    for name, content in FILES.items():
        s3.put_object(Bucket=BUCKET, Key=f"in/{name}", Body=content.encode())
    return job_at(tmp_path, {"endpoint_url": ceph}, f"s3://{BUCKET}/in/", f"s3://{BUCKET}/out/")


def use(monkeypatch: pytest.MonkeyPatch, **keys: str) -> None:
    """The next session has other keys."""
    for name, value in keys.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize(
    "wrong", [{"secret_access_key": "wrong"}, {"access_key_id": "nobody"}], ids=["secret", "key"]
)
def test_keys_that_are_refused_are_told_in_one_line(
    job: Job, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    use(monkeypatch, **wrong)
    with pytest.raises(StoreError, match=REFUSED) as caught:
        run_fake(job)
    assert "\n" not in str(caught.value)


def test_keys_that_are_refused_for_the_output_are_told_in_one_line(
    tmp_path: Path, s3: Any, ceph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, FILES)
    use(monkeypatch, secret_access_key="wrong")
    with pytest.raises(StoreError, match=REFUSED) as caught:
        run_fake(job_at(tmp_path, {"endpoint_url": ceph}, str(tmp_path / "in"), f"s3://{BUCKET}/out"))
    assert "\n" not in str(caught.value)
    assert keys(s3) == []


def test_a_wrong_clock_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = botocore.auth.get_current_datetime
    with monkeypatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", lambda: now() + timedelta(hours=1))
        with pytest.raises(StoreError, match=rf"{REFUSED} and this machine's clock"):
            run_fake(job)


def session_keys(endpoint: str) -> dict[str, str]:
    """Temporary keys of the gateway's user, valid for an hour."""
    allowed = {"Effect": "Allow", "Action": "sts:GetSessionToken", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    with closing(boto3.client("iam", endpoint_url=endpoint)) as iam:
        iam.put_user_policy(UserName=USER, PolicyName="session-tokens", PolicyDocument=policy)
    with closing(boto3.client("sts", endpoint_url=endpoint)) as sts:
        return dict(sts.get_session_token()["Credentials"])


def test_a_session_token_opens_the_bucket_and_a_garbled_one_is_told(
    job: Job, ceph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_keys(ceph)
    temporary = {"access_key_id": session["AccessKeyId"], "secret_access_key": session["SecretAccessKey"]}
    use(monkeypatch, **temporary, session_token=session["SessionToken"])
    run_fake(job)
    assert verify(store_of(job)).problems == ()
    use(monkeypatch, **temporary, session_token=session["SessionToken"][::-1])
    with pytest.raises(StoreError, match=REFUSED):
        run_fake(job)


def test_a_file_that_is_uploaded_in_parts_arrives_whole(s3: Any, ceph: str) -> None:
    """s3fs sends 100 MiB and more in parts of 50 MiB."""
    store = Store.open(f"s3://{BUCKET}/out #1", StorageConfig(options={"endpoint_url": ceph}))
    content = random.Random(1).randbytes(MIB) * 100 + b"the end"
    store.write_bytes("a+b.parquet", content)
    assert s3.head_object(Bucket=BUCKET, Key="out #1/a+b.parquet")["ETag"].endswith('-3"')
    assert store.sizes() == {"a+b.parquet": len(content)}
    assert store.read_bytes("a+b.parquet") == content
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=BUCKET)


def test_a_listing_of_more_than_a_page_is_whole_and_fresh(s3: Any, ceph: str) -> None:
    config = StorageConfig(options={"endpoint_url": ceph})
    names = [f"{number:04} #.jsonl" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: s3.put_object(Bucket=BUCKET, Key=f"in/{name}", Body=b"{}"), names))
    store = Store.open(f"s3://{BUCKET}/in", config)
    assert store.sizes() == dict.fromkeys(names, 2)
    s3.put_object(Bucket=BUCKET, Key="in/last.jsonl", Body=b"[]")
    s3.delete_object(Bucket=BUCKET, Key=f"in/{names.pop(0)}")
    expected = [f"s3://{BUCKET}/in/{name}" for name in [*names, "last.jsonl"]]
    assert [file.uri for file in find_corpus(InputSpec(uri=f"s3://{BUCKET}/in"), config).files] == expected
    assert len(store.sizes()) == len(expected)
