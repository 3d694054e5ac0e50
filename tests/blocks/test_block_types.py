"""What Prefect asks of a block, and what the job asks: the same settings, the same defaults."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from pydantic import BaseModel, ValidationError

import blocks
from blocks import ModelSettings, StorageSettings, TokenizerSettings
from tokenmill.errors import UnknownKeyError
from tokenmill.job import InferenceSpec, StorageSpec, TokenizerSpec

ALL = [TokenizerSettings, ModelSettings, StorageSettings]


@pytest.mark.parametrize("block", ALL)
class TestPrefectsStandard(BlockStandardTestSuite):
    @pytest.fixture
    def block(self) -> type[Block]:  # the parameter takes its place
        raise AssertionError

    @pytest.mark.skip(reason="downloads the logo; the tests run offline")
    def test_has_a_valid_image(self, block: type[Block]) -> None: ...


def test_slugs_are_what_saved_blocks_and_jobs_rely_on() -> None:
    slugs = [block.get_block_type_slug() for block in ALL]
    assert slugs == ["tokenmill-tokenizer", "tokenmill-model", "tokenmill-storage"]


def test_prefect_finds_the_blocks_by_the_entry_point() -> None:
    [entry] = entry_points(group="prefect.collections", name="tokenmill")
    assert entry.load() is blocks


@pytest.mark.parametrize(
    ("block", "spec"),
    [(TokenizerSettings, TokenizerSpec), (ModelSettings, InferenceSpec), (StorageSettings, StorageSpec)],
)
def test_every_setting_of_the_job_is_in_the_block(block: type[Block], spec: type[BaseModel]) -> None:
    def fields(model: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
        return {
            name: (field.annotation, field.default, field.description, field.metadata)
            for name, field in model.model_fields.items()
            if name not in ("block", "key", "secret", "session_token")
        }

    assert fields(block) == fields(spec)


@pytest.mark.parametrize("block", ALL)
def test_a_misspelt_setting_is_refused(block: type[Block]) -> None:
    with pytest.raises(UnknownKeyError, match="unknown key 'max_token'; valid keys: "):
        block(max_token=3)


@pytest.mark.parametrize(
    ("block", "settings", "message"),
    [
        (TokenizerSettings, {"max_tokens": 0}, "max_tokens\n  Input should be greater than or equal to 1"),
        (TokenizerSettings, {"prompt": "a", "prompt_name": "b"}, "prompt or prompt_name, not both"),
        (ModelSettings, {"device": "gpu"}, "device\n  String should match pattern"),
        (StorageSettings, {"key": "a"}, "give key and secret, or neither"),
        (StorageSettings, {"session_token": "a"}, "a session_token needs key and secret"),
        (StorageSettings, {"key": "a", "secret": "b", "anon": True}, "give keys or anon, not both"),
    ],
)
def test_what_no_job_could_have_is_refused_before_it_is_saved(
    block: type[Block], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        block(**settings)
