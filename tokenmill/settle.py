"""What a job comes to on this machine: folders found, options settled, misfits refused.

`prepare` turns a Job into a Setup before any shard starts. Only the tokenizer is loaded; the model
is loaded by `InferSetup.load`, where inference runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenmill.backend import Backend
from tokenmill.chat import ChatTemplate, ChatTokenizer
from tokenmill.errors import ConfigError, ModelMismatchError
from tokenmill.generation import Detokenizer, Generator, Sampling
from tokenmill.job import Job
from tokenmill.model_files import (
    EncoderRecipe,
    ModelLimits,
    folder_fingerprint,
    folder_state,
    read_limits,
    read_recipe,
    resolve_model,
)
from tokenmill.model_heads import LabelRecipe, check_head, read_labels, read_stop_ids
from tokenmill.results import (
    ResultColumns,
    classify_columns,
    embed_columns,
    rank_columns,
    score_columns,
)
from tokenmill.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenmill.torch_backend import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeSetup:
    """Everything that decides the ids of a row.

    stride, inner_suffix: of `tokenmill.cut.wrap_chunks`.
    """

    tokenizer: Tokenizer
    prompt: str
    num_prompt_tokens: int
    max_tokens: int
    overflow: str
    truncation_side: str
    special_tokens_in_text: str
    model_vocab_size: int | None
    chat: ChatTemplate | None = None
    stride: int = 0
    inner_suffix: bool = True

    def key_options(self) -> dict[str, Any]:
        """What goes into the tokenize key."""
        chunks = {"stride": self.stride, "inner_suffix": self.inner_suffix}
        return {
            **(chunks if self.overflow == "chunk" else {}),
            "tokenizer": self.tokenizer.info.fingerprint,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "overflow": self.overflow,
            "truncation_side": self.truncation_side,
            "special_tokens_in_text": self.special_tokens_in_text,
            "model_vocab_size": self.model_vocab_size,
        }


Model = Backend | Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class InferSetup:
    """Everything that decides the result of a token sequence.  sampling, detokenizer: to generate."""

    folder: Path
    recipe: EncoderRecipe
    job: Job
    num_prompt_tokens: int
    pad_id: int
    second_type: int = 0
    labels: LabelRecipe | None = None
    sampling: Sampling | None = None
    detokenizer: Detokenizer | None = None

    def key_options(self) -> dict[str, Any]:
        """What goes into the infer key."""
        spec = self.job.inference
        common = {
            "model": folder_fingerprint(self.folder),
            "task": spec.task,
            "precision": spec.precision,
        }
        return {**common, **self._task_options()}

    def _task_options(self) -> dict[str, Any]:
        """Those of the task alone."""
        spec = self.job.inference
        if self.labels is not None:
            several = {"threshold": spec.threshold} if self.labels.several else {}
            chunks = {"pool_chunks": spec.pool_chunks} if self.in_chunks else {}
            return {"activation": self.labels.activation, "all_scores": spec.all_scores, **several, **chunks}
        if spec.task == "score":
            return {}
        if self.sampling is not None:
            return self._generate_options(self.sampling)
        return {
            "pooling": self.recipe.pooling,
            "normalize": self.recipe.normalize,
            "dimensions": spec.dimensions,
            "dtype": spec.dtype,
            "skipped_prompt_tokens": 0 if self.recipe.pools_prompt else self.num_prompt_tokens,
        }

    def _generate_options(self, sampling: Sampling) -> dict[str, Any]:
        """Draws have options that the likeliest tokens do not."""
        spec = self.job.inference
        names = ("temperature", "top_p", "top_k", "seed", "num_outputs")
        drawn = {} if sampling.is_greedy else {name: getattr(spec, name) for name in names}
        ends = {"stop": spec.stop, "stop_ids": sorted(sampling.stop_ids)}
        return {"max_new_tokens": spec.max_new_tokens, **ends, **drawn}

    @property
    def in_chunks(self) -> bool:
        """Whether one text may be several rows of tokens."""
        return self.job.tokenizer.overflow == "chunk"

    def describe(self) -> dict[str, Any]:
        """The task, and what is particular to it."""
        task = self.job.inference.task
        if self.labels is not None:
            return {"task": task, "labels": [*self.labels.names], "activation": self.labels.activation}
        if task == "generate":
            return {"task": task, "max_new_tokens": self.job.inference.max_new_tokens}
        return {"task": task, **({"pooling": self.recipe.pooling} if task == "embed" else {})}

    def result_columns(self, num_values: int) -> ResultColumns:
        """The columns that the task adds to a row.  num_values: `BackendInfo.num_values`."""
        spec = self.job.inference
        if spec.task == "classify":
            assert self.labels is not None
            threshold = spec.threshold if self.labels.several else None
            return classify_columns(
                self.labels.names, all_scores=spec.all_scores, threshold=threshold, pool=spec.pool_chunks
            )
        if spec.task == "embed":
            return embed_columns(num_values, spec.dtype, normalize=self.recipe.normalize)
        return rank_columns() if spec.task == "rank" else score_columns()

    def devices(self) -> tuple[str, ...]:
        """Where the model may run, a copy each.  Raises ConfigError for a device that is not there."""
        from tokenmill.torch_device import find_devices

        return find_devices(self.job.inference.device)

    def load(self, device: str | None = None) -> Model:
        """The model, on a device, by default the first; loaded there once per process.

        Raises ConfigError's leaves, BackendUnavailableError.
        """
        return self.load_backend(device) if self.sampling is None else self.load_generator(device)

    def load_backend(self, device: str | None = None) -> Backend:
        """As `load`, for every task but generate."""
        from tokenmill.torch_backend import load_backend

        return load_backend(self._model_spec(device))

    def load_generator(self, device: str | None = None) -> Generator:
        """As `load`, for task generate."""
        from tokenmill.torch_generation import load_generator

        return load_generator(self._model_spec(device))

    def _model_spec(self, device: str | None) -> ModelSpec:
        from tokenmill.torch_backend import ModelSpec

        spec = self.job.inference
        return ModelSpec(
            folder=self.folder,
            state=folder_state(self.folder),
            task=spec.task,
            device=device or self.devices()[0],
            precision=spec.precision,
            recipe=self.recipe,
            dimensions=spec.dimensions,
            activation=cast(Any, self.labels.activation) if self.labels else None,
            num_prompt_tokens=self.num_prompt_tokens,
            pad_id=self.pad_id,
            second_type=self.second_type,
            threads=self.job.run.threads,
            trust_remote_code=spec.trust_remote_code,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A job, settled. `infer` is None for a job that names no model."""

    job: Job
    tokenize: TokenizeSetup
    infer: InferSetup | None

    def need_model(self) -> InferSetup:
        """Raises ConfigError for a job without a model."""
        if self.infer is None:
            raise ConfigError("inference.model is missing; name a model, or use `tokenmill tokenize`")
        return self.infer

    def describe(self) -> Mapping[str, Any]:
        """What a plan or report says of it."""
        info = self.tokenize.tokenizer.info
        model = {"model": str(self.infer.folder), **self.infer.describe()} if self.infer else {}
        return {"vocabulary": info.vocab_size, "max_tokens": self.tokenize.max_tokens, **model}


def prepare(job: Job) -> Setup:
    """Settle a job.  Raises ModelNotFoundError, ModelMismatchError, ConfigError."""
    _refuse_blocks(job)
    spec = job.inference
    if spec.model is None and job.tokenizer.name is None:
        raise ConfigError("inference.model is missing; name a folder, package:NAME/FOLDER or hub id")
    folder = resolve_model(spec.model) if spec.model else None
    recipe = _recipe(job, folder) if folder else None
    limits = read_limits(folder) if folder else ModelLimits(vocab_size=None, positions=None)
    tokenize = _tokenize_setup(job, folder, recipe, limits)
    if folder is None or recipe is None:
        return Setup(job=job, tokenize=tokenize, infer=None)
    check_head(folder, spec.task)
    infer = InferSetup(
        folder=folder,
        recipe=recipe,
        job=job,
        num_prompt_tokens=tokenize.num_prompt_tokens,
        pad_id=_pad_id(tokenize.tokenizer, limits),
        second_type=pair.second_type if (pair := tokenize.tokenizer.info.pair) and job.input.pair else 0,
        labels=_labels(job, folder),
        sampling=read_sampling(job, read_stop_ids(folder)),
        detokenizer=Detokenizer(tokenize.tokenizer.decode, spec.stop),
    )
    return Setup(job=job, tokenize=tokenize, infer=infer)


def read_sampling(job: Job, stop_ids: frozenset[int]) -> Sampling | None:
    """How a job generates; None if it does not.  stop_ids: the model's own."""
    spec = job.inference
    if spec.task != "generate":
        return None
    return Sampling(
        max_new_tokens=spec.max_new_tokens,
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        stop_ids=stop_ids | frozenset(spec.stop_ids),
    )


def _refuse_blocks(job: Job) -> None:
    blocks = {
        "tokenizer": job.tokenizer.block,
        "inference": job.inference.block,
        "input.storage": job.input.storage.block,
        "output.storage": job.output.storage.block,
    }
    for name, block in blocks.items():
        if block:
            raise ConfigError(f"{name}.block: {block!r} can only be loaded under Prefect")


def _recipe(job: Job, folder: Path) -> EncoderRecipe:
    """The model's own recipe with what the job overrides."""
    spec = job.inference
    override = None if spec.pooling == "auto" else spec.pooling
    recipe = read_recipe(folder, override)
    normalize = recipe.normalize if spec.normalize is None else spec.normalize
    return replace(recipe, pooling=override or recipe.pooling, normalize=normalize)


def _labels(job: Job, folder: Path) -> LabelRecipe | None:
    """Of classify and rank, with what the job overrides."""
    spec = job.inference
    if spec.task not in ("classify", "rank"):
        return None
    labels = read_labels(folder, spec.task)
    return labels if spec.activation == "auto" else replace(labels, activation=spec.activation)


def _tokenize_setup(
    job: Job, folder: Path | None, recipe: EncoderRecipe | None, limits: ModelLimits
) -> TokenizeSetup:
    spec = job.tokenizer
    place = resolve_model(spec.name) if spec.name else folder
    assert place is not None  # prepare() has checked that one of the two is named
    plain = load_tokenizer(
        place,
        parse_special_tokens=spec.special_tokens_in_text == "parse" or job.input.messages is not None,
        trust_remote_code=job.inference.trust_remote_code,
        lower_case=bool(recipe and recipe.lower_case),
    )
    chat = _chat_template(job, plain) if job.input.messages is not None else None
    generates = job.inference.task == "generate"
    tokenizer: Tokenizer = plain.open_ended() if generates else plain
    if chat:
        tokenizer = _chat_tokenizer(job, place, plain, chat)
    if job.input.pair is not None and tokenizer.info.pair is None:
        raise ModelMismatchError(
            "input.pair: the tokenizer has no fixed way to join two texts; use input.text"
        )
    prompt = _prompt(job, recipe)
    side = spec.truncation_side or ("left" if generates and not prompt else "right")
    if prompt and side == "left":
        raise ConfigError("tokenizer.truncation_side: left would cut off the prompt; use right, or no prompt")
    num_prompt_tokens = _num_prompt_tokens(tokenizer, prompt)
    max_tokens = _max_tokens(job, tokenizer, recipe, limits)
    return TokenizeSetup(
        tokenizer=tokenizer,
        prompt=prompt,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        overflow=spec.overflow,
        truncation_side=side,
        special_tokens_in_text=spec.special_tokens_in_text,
        model_vocab_size=limits.vocab_size,
        chat=chat,
        stride=_stride(job, tokenizer, max_tokens, num_prompt_tokens),
        inner_suffix=job.inference.task != "score",
    )


def _stride(job: Job, tokenizer: Tokenizer, max_tokens: int, num_prompt_tokens: int) -> int:
    """Raises ConfigError where a chunk would hold nothing new."""
    if job.tokenizer.overflow != "chunk":
        return 0
    info = tokenizer.info
    room = max_tokens - max(num_prompt_tokens, len(info.prefix_ids)) - len(info.suffix_ids)
    usual = room // 2 if job.inference.task == "score" else 0
    stride = usual if job.tokenizer.stride is None else job.tokenizer.stride
    if stride >= room:
        raise ConfigError(
            f"tokenizer.stride: {stride} leaves no room for new tokens in chunks of {max_tokens}, of which "
            f"{max_tokens - room} are special tokens and prompt"
        )
    return stride


def _chat_template(job: Job, tokenizer: HuggingFaceTokenizer) -> ChatTemplate:
    if job.tokenizer.prompt or job.tokenizer.prompt_name:
        raise ConfigError("tokenizer.prompt: not with input.messages; put it into a system message")
    asked = job.tokenizer.add_generation_prompt
    return ChatTemplate(
        tokenizer.fast,
        tokenizer.info.special_tokens,
        keep_as_text=job.tokenizer.special_tokens_in_text != "parse",
        generate=job.inference.task == "generate" if asked is None else asked,
        form=job.input.unicode,
    )


def _chat_tokenizer(
    job: Job, place: Path, obeying: HuggingFaceTokenizer, template: ChatTemplate
) -> ChatTokenizer:
    literal = load_tokenizer(
        place, parse_special_tokens=False, trust_remote_code=job.inference.trust_remote_code
    )
    return ChatTokenizer(obeying, literal, template)


def _prompt(job: Job, recipe: EncoderRecipe | None) -> str:
    if job.tokenizer.prompt is not None:
        return job.tokenizer.prompt
    prompts = dict(recipe.prompts) if recipe else {}
    name = job.tokenizer.prompt_name or (recipe.default_prompt if recipe else None)
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise ConfigError(f"tokenizer.prompt_name: the model has no prompt {name!r}; it has: {known}")
    return prompts[name]


def _num_prompt_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """Tokens at the start of each row that come from the prompt, special ones before it included."""
    if not prompt:
        return 0
    return len(tokenizer.info.prefix_ids) + int(tokenizer.encode([prompt]).offsets_N1[-1])


def _max_tokens(job: Job, tokenizer: Tokenizer, recipe: EncoderRecipe | None, limits: ModelLimits) -> int:
    asked = job.tokenizer.max_tokens
    positions = _prompt_positions(job, limits)
    own = [recipe.max_tokens if recipe else None, positions, tokenizer.info.max_tokens]
    known = [limit for limit in own if limit]
    if asked is None:
        if not known:
            raise ConfigError("tokenizer.max_tokens: the model states no limit; set one")
        return min(known)
    if positions and asked > positions:
        new = f" less {job.inference.max_new_tokens} new tokens" if positions != limits.positions else ""
        raise ModelMismatchError(
            f"tokenizer.max_tokens: {asked} is more than the model's {limits.positions} positions{new}"
        )
    pair = tokenizer.info.pair if job.input.pair is not None else None
    num_special = pair.num_special if pair else tokenizer.info.num_special
    if asked <= num_special:
        raise ConfigError(f"tokenizer.max_tokens: {asked} leaves no room beside {num_special} special tokens")
    return asked


def _prompt_positions(job: Job, limits: ModelLimits) -> int | None:
    """Positions that a row may take; new tokens need some of the model's."""
    if limits.positions is None or job.inference.task != "generate":
        return limits.positions
    new = job.inference.max_new_tokens
    if new >= limits.positions:
        raise ModelMismatchError(
            f"inference.max_new_tokens: {new} leaves no room for a prompt among the model's "
            f"{limits.positions} positions"
        )
    return limits.positions - new


def _pad_id(tokenizer: Tokenizer, limits: ModelLimits) -> int:
    """Subtle: a pad id beyond the embedding table would crash the device; any id does under a mask."""
    pad = tokenizer.info.pad_id
    return pad if limits.vocab_size is None or pad < limits.vocab_size else 0
