"""A block becomes exactly what the engine takes; secrets come out there and nowhere else."""

from __future__ import annotations

import json
import logging

import fsspec
import pytest
from pydantic import ValidationError

from blocks import ModelSettings, StorageSettings, TokenizerSettings
from blocks.saved import first_complaint
from tokenmill.job import InferenceSpec, TokenizerSpec

KEY, SECRET, TOKEN = "AKIAEXAMPLEKEY", "sEcReTvalue", "tOkEnvalue"


@pytest.fixture
def storage() -> StorageSettings:
    return StorageSettings(
        key=KEY, secret=SECRET, session_token=TOKEN, endpoint_url="http://127.0.0.1:9", region="eu-north-1"
    )


def test_a_tokenizer_block_is_the_job_section() -> None:
    block = TokenizerSettings(max_tokens=64, overflow="reject", prompt="query: ")
    assert block.to_config() == TokenizerSpec(max_tokens=64, overflow="reject", prompt="query: ")


def test_a_model_block_is_the_job_section() -> None:
    block = ModelSettings(model="a/b", precision="fp32", dimensions=128)
    assert block.to_config() == InferenceSpec(model="a/b", precision="fp32", dimensions=128)


def test_a_block_that_says_nothing_changes_nothing() -> None:
    assert TokenizerSettings().to_config() == TokenizerSpec()
    assert ModelSettings().to_config() == InferenceSpec()
    assert StorageSettings().to_config().options == {}


def test_a_storage_block_becomes_s3fs_options(storage: StorageSettings) -> None:
    assert storage.to_config().options == {
        "key": KEY,
        "secret": SECRET,
        "token": TOKEN,
        "endpoint_url": "http://127.0.0.1:9",
        "client_kwargs": {"region_name": "eu-north-1"},
    }


def test_an_anonymous_storage_block_needs_no_key() -> None:
    assert StorageSettings(anon=True).to_config().options == {"anon": True}


def test_s3fs_takes_the_options(storage: StorageSettings) -> None:
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **storage.to_config().options)
    assert (fs.key, fs.secret, fs.token) == (KEY, SECRET, TOKEN)
    assert fs.endpoint_url == "http://127.0.0.1:9"


def test_secrets_are_in_no_text_of_a_block_or_its_config(
    storage: StorageSettings, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("test").warning("%s %r", storage, storage.to_config())
    texts = [repr(storage), str(storage), storage.model_dump_json(), str(storage.model_dump()), caplog.text]
    texts += [repr(storage.to_config()), str(storage.to_config())]
    for secret in (KEY, SECRET, TOKEN):
        assert [text for text in texts if secret in text] == []


def test_a_refused_block_does_not_print_its_secrets() -> None:
    with pytest.raises(ValidationError) as caught:
        StorageSettings(key=KEY, secret=SECRET, session_token=TOKEN, anon=True)
    assert first_complaint(caught.value) == "give keys or anon, not both"
    for secret in (KEY, SECRET, TOKEN):
        assert secret not in str(caught.value) + repr(caught.value)


def test_a_block_survives_prefects_own_dump(storage: StorageSettings) -> None:
    dump = json.loads(TokenizerSettings(max_tokens=7).model_dump_json())
    assert TokenizerSettings.model_validate(dump).max_tokens == 7
