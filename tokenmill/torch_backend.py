"""The one module that loads models onto a device: a transformers checkpoint under torch.

Only the values of each row come back from the device; what they are is the head's (`torch_heads`).
Legend: B rows of a batch, L longest row in tokens, V values of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)
from transformers.utils import logging as transformers_logging

from tokenmill.backend import Backend, BackendInfo, Values
from tokenmill.errors import BackendUnavailableError, ModelMismatchError, ModelNotFoundError
from tokenmill.int8 import num_parameters, quantize
from tokenmill.model_files import EncoderRecipe, FolderState, first_line, read_json
from tokenmill.torch_device import (
    DEFAULT_BATCH_TOKENS,
    DTYPES,
    device_errors,
    find_devices,
    keep_freed_memory,
    peak_device_memory,
    pick_precision,
)
from tokenmill.torch_heads import (
    Activation,
    EmbedHead,
    Head,
    Inputs,
    LabelHead,
    ScoreHead,
    check_token_logits,
)

MODEL_CLASSES: Mapping[str, Any] = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "rank": AutoModelForSequenceClassification,
    "score": AutoModelForCausalLM,
    "generate": AutoModelForCausalLM,
}


Loaded = TypeVar("Loaded")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What a backend is made from, and what the cache of loaded ones goes by.

    state: `folder_state(folder)`.  recipe, dimensions, num_prompt_tokens: of embed.
    activation: of classify and rank.
    """

    folder: Path
    state: FolderState
    task: str
    device: str
    precision: str
    recipe: EncoderRecipe
    dimensions: int | None = None
    activation: Activation | None = None
    num_prompt_tokens: int = 0
    pad_id: int = 0
    second_type: int = 0
    threads: int | None = None
    trust_remote_code: bool = False


class TorchBackend:
    """A model with the head of one task.  Implements `tokenmill.backend.Backend`."""

    def __init__(
        self, model: nn.Module, head: Head, spec: ModelSpec, *, device: torch.device, precision: str
    ) -> None:
        self._device, self._model, self._head, self._spec = device, model, head, spec
        self._in_fp32: TorchBackend | None = None
        config = cast(Any, model).config
        # Subtle: a tokenizer may give types to a model that has none.
        has_type = (getattr(config, "type_vocab_size", 0) or 0) > spec.second_type
        self._second_type = spec.second_type if has_type else 0
        self.info = backend_info(model, spec, device, precision, head.num_values)

    def run(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        starts_B: npt.NDArray[np.int64] | None = None,
    ) -> Values:
        starts = None if starts_B is None else torch.from_numpy(starts_B)
        with device_errors(f"{ids_BL.shape[0]} x {ids_BL.shape[1]} tokens"), torch.inference_mode():
            inputs = self._inputs(torch.from_numpy(ids_BL), torch.from_numpy(lengths_B), starts)
            return cast(Values, self._head(self._model, inputs).cpu().numpy())

    def _inputs(self, ids_BL: Tensor, lengths_B: Tensor, starts_B: Tensor | None) -> Inputs:
        places_L = torch.arange(ids_BL.shape[1])
        real_BL = places_L < lengths_B[:, None]
        types_BL = None
        if starts_B is not None and self._second_type:
            second_BL = real_BL & (places_L >= starts_B[:, None])
            types_BL = (second_BL * self._second_type).to(self._device)
        later_BL = None if starts_B is None else (places_L >= starts_B[:, None]).to(self._device)
        return Inputs(
            ids_BL=ids_BL.to(self._device),
            real_BL=real_BL.to(self._device),
            types_BL=types_BL,
            later_BL=later_BL,
        )

    def in_fp32(self) -> Backend | None:
        """Loaded when first asked for, onto the same device."""
        if self.info.precision == "fp32":
            return None
        if self._in_fp32 is None:
            self._in_fp32 = load_in_fp32(load_uncached, self._spec, self.info.device)
        return self._in_fp32

    def device_memory_bytes(self) -> int:
        return peak_device_memory(self._device)


def load_backend(spec: ModelSpec) -> TorchBackend:
    """Load a checkpoint, once per process, device and state of its files; safetensors only, no network.

    Raises ModelNotFoundError, ModelMismatchError, ConfigError, BackendUnavailableError.
    """
    return cached(load_uncached, spec)


def cached(load: Callable[[ModelSpec], Loaded], spec: ModelSpec) -> Loaded:
    """What `load` makes of a spec, remembered."""
    return cast(Loaded, _cache_of(load, spec.device)(spec))


@functools.cache
def _cache_of(load: Callable[[ModelSpec], object], device: str) -> Callable[[ModelSpec], object]:  # noqa: ARG001
    """A way of loading that remembers two models of each device.

    Subtle: one cache for all devices would drop the models of some while others are loaded.
    """
    return functools.lru_cache(maxsize=2)(load)


def load_uncached(spec: ModelSpec) -> TorchBackend:
    """As `load_backend`, but another copy of the weights."""
    placed = place_model(spec)
    with fitting(spec, placed.device):
        head = _make_head(placed.model, spec, placed.device)
        return TorchBackend(placed.model, head, spec, device=placed.device, precision=placed.precision)


def load_in_fp32(load: Callable[[ModelSpec], Loaded], spec: ModelSpec, device: str) -> Loaded | None:
    """The same model in float32, on the device of the other; None if there is no memory for it."""
    with suppress(BackendUnavailableError, MemoryError):
        return load(replace(spec, device=device, precision="fp32"))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModel:
    """A checkpoint's weights on a device."""

    model: nn.Module
    device: torch.device
    precision: str


def place_model(spec: ModelSpec) -> PlacedModel:
    """Load a checkpoint's weights and put them onto their device.  Raises as `load_backend`."""
    device = torch.device(find_devices(spec.device)[0])
    precision = pick_precision(spec.precision, str(device))
    keep_freed_memory()
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32: TF32 keeps 10 bits of 23
    torch.backends.cudnn.allow_tf32 = False
    if spec.threads:
        torch.set_num_threads(spec.threads)
    model = _load_model(spec, precision)
    if precision == "int8":
        quantize(model)
    with fitting(spec, device):
        return PlacedModel(model=model.to(device=device).eval(), device=device, precision=precision)


@contextmanager
def fitting(spec: ModelSpec, device: torch.device) -> Iterator[None]:
    """Raises BackendUnavailableError for a model that does not fit."""
    try:
        yield
    except torch.OutOfMemoryError as exc:
        raise BackendUnavailableError(
            f"model {spec.folder}: does not fit into the free memory of {device}: {first_line(exc)}"
        ) from exc


def backend_info(
    model: nn.Module, spec: ModelSpec, device: torch.device, precision: str, num_values: int
) -> BackendInfo:
    """What a receipt says of a loaded model."""
    return BackendInfo(
        model_type=cast(Any, model).config.model_type,
        num_parameters=num_parameters(model),
        device=str(device),
        precision=precision,
        matmul=torch.get_float32_matmul_precision(),
        num_values=num_values,
        pad_id=spec.pad_id,
        default_batch_tokens=DEFAULT_BATCH_TOKENS[device.type],
    )


def _make_head(model: nn.Module, spec: ModelSpec, device: torch.device) -> Head:
    if spec.task == "embed":
        skip = 0 if spec.recipe.pools_prompt else spec.num_prompt_tokens
        return EmbedHead(spec.recipe, _hidden_size(model), spec.dimensions, skip, device)
    if spec.task == "score":
        check_token_logits(model, device, f"model {spec.folder}")
        return ScoreHead()
    assert spec.activation is not None
    return LabelHead(num_values=int(cast(Any, model).config.num_labels), activation=spec.activation)


def _hidden_size(model: nn.Module) -> int:
    config = cast(Any, model).config
    return int(getattr(config, "hidden_size", None) or config.d_model)


def _model_class(folder: Path, task: str) -> Any:
    """Subtle: of a model with encoder and decoder, only the encoder gives vectors."""
    config = read_json(folder / "config.json") or {}
    cut = any(name.endswith("EncoderModel") for name in config.get("architectures") or [])
    encodes = task == "embed" and (cut or config.get("is_encoder_decoder"))
    return AutoModelForTextEncoding if encodes else MODEL_CLASSES[task]


def _load_model(spec: ModelSpec, precision: str) -> nn.Module:
    folder, task = spec.folder, spec.task
    transformers_logging.disable_progress_bar()
    if not any(folder.glob("*.safetensors")):
        raise ModelMismatchError(
            f"model {folder}: no .safetensors file; tokenmill does not load pickled weights"
        )
    try:
        model, report = _model_class(folder, task).from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            dtype=DTYPES[precision],
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as exc:  # whatever a damaged checkpoint provokes in foreign code
        raise ModelNotFoundError(f"model {folder}: cannot be loaded: {first_line(exc)}") from exc
    optional = "pooler." if task == "embed" else ()
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(optional))
    if missing:
        raise ModelMismatchError(
            f"model {folder}: weights that {task} needs are missing, the first is {missing[0]}"
        )
    model.config.use_cache = False
    return cast(nn.Module, model)
