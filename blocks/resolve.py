"""From block names in a job to settings and keys. Nothing is asked of a server unless a block is named.

A key that the job itself gives beside a block wins over the block's.
"""

from __future__ import annotations

from typing import Any, TypeVar

from prefect.blocks.core import Block
from pydantic import ValidationError

from blocks.aws_credentials import AWS_SLUG, load_aws_credentials
from blocks.mirror import settings_of
from blocks.model_settings import ModelSettings
from blocks.saved import first_complaint, load_block
from blocks.storage_settings import StorageSettings
from blocks.tokenizer_settings import TokenizerSettings
from tokenmill.engine import Storages
from tokenmill.errors import ConfigError
from tokenmill.job import InferenceSpec, InputSpec, Job, OutputSpec, StorageSpec, TokenizerSpec
from tokenmill.store import StorageConfig

B = TypeVar("B", bound=Block)
S = TypeVar("S", InputSpec, OutputSpec)


def resolve(job: Job) -> tuple[Job, Storages]:
    """The job without any block, and how to open its storage. Secrets are in the second alone.

    Raises ConfigError for a block that is not there or does not fit, StoreUnavailableError for a
    Prefect server that does not answer.
    """
    storages = Storages(
        input=_storage("input.storage", job.input.storage),
        output=_storage("output.storage", job.output.storage),
    )
    job = inline_settings(job)
    without = {"input": _without_block(job.input), "output": _without_block(job.output)}
    return job.model_copy(update=without), storages


def inline_settings(job: Job) -> Job:
    """The job with the settings of its tokenizer and model blocks written out.

    Storage blocks stay names. A flow hands this to its tasks: a block that is edited while the flow
    runs must not change what its later shards compute.
    """
    sections: dict[str, TokenizerSpec | InferenceSpec] = {}
    if job.tokenizer.block:
        tokenizer = _load(TokenizerSettings, job.tokenizer.block, "tokenizer.block")
        sections["tokenizer"] = _overridden(tokenizer, job.tokenizer, "tokenizer").to_config()
    if job.inference.block:
        model = _load(ModelSettings, job.inference.block, "inference.block")
        sections["inference"] = _overridden(model, job.inference, "inference").to_config()
    return job.model_copy(update=sections) if sections else job


def _storage(where: str, spec: StorageSpec) -> StorageConfig:
    if not spec.block:
        return StorageConfig.from_spec(spec)
    if spec.block.startswith(f"{AWS_SLUG}/"):
        saved = load_aws_credentials(spec.block.removeprefix(f"{AWS_SLUG}/"), f"{where}.block")
    else:
        saved = _load(StorageSettings, spec.block, f"{where}.block")
    return _overridden(saved, spec, where).to_config()


def _load(kind: type[B], name: str, where: str) -> B:
    """name: NAME, or KIND/NAME with the kind that belongs there."""
    slug = kind.get_block_type_slug()
    bare = name.removeprefix(f"{slug}/")
    if "/" in bare:
        also = f" or {AWS_SLUG}/NAME" if kind is StorageSettings else ""
        raise ConfigError(f"{where}: {name!r} is of another kind; name a {slug} block: NAME{also}")
    block = load_block(kind, bare, where)
    assert isinstance(block, kind)
    return block


def _overridden(block: B, section: TokenizerSpec | InferenceSpec | StorageSpec, where: str) -> B:
    """The block with what the job gives beside it."""
    try:
        return type(block)(**{**settings_of(block), **given(section)})
    except ValidationError as exc:
        raise ConfigError(
            f"{where}: does not fit with block {section.block!r}: {first_complaint(exc)}"
        ) from exc


def given(section: TokenizerSpec | InferenceSpec | StorageSpec) -> dict[str, Any]:
    """The settings that the job's author gave, without the block's name.

    Subtle: Prefect's form, and a dump of a whole job, spell out every default. A section like that
    says nothing about what its author wanted; there, only values that differ from the default count.
    Example: {block: x, overflow: truncate} -> {overflow: truncate}, which wins over the block.
    """
    fields = type(section).model_fields
    names = section.model_fields_set - {"block"}
    defaults = {name: field.default for name, field in fields.items() if field.default is not None}
    spelled_out = defaults.keys() <= names
    values = {name: getattr(section, name) for name in names}
    if not spelled_out:
        return values
    return {name: value for name, value in values.items() if value != fields[name].default}


def _without_block(part: S) -> S:
    storage = part.storage.model_copy(update={"block": None})
    return part.model_copy(update={"storage": storage})
