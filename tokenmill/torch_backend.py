"""The one module that touches the device: a transformers encoder under torch.

Pooling, normalisation and the cast to float32 happen on the device; only (B, D) vectors come back.
Legend: B rows of a batch, L longest row in tokens, D dimensions.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from tokenmill.backend import BackendInfo
from tokenmill.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    ModelMismatchError,
    ModelNotFoundError,
    OutOfMemoryError,
)
from tokenmill.model_files import EncoderRecipe, FolderState, first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}
DEFAULT_BATCH_TOKENS = {"cpu": 2048, "mps": 16_384, "cuda": 131_072}

# Subtle: only CUDA's allocator has an exception of its own; the others raise RuntimeError.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def keep_freed_memory() -> None:
    """Let glibc reuse freed activations instead of giving them back and faulting them in again.

    Matters for batches above the default budget: docs/decisions.md, "Memory that was freed is kept".
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def pick_device(asked: str) -> torch.device:
    """auto: a GPU if there is one.  Raises ConfigError for a device that is not there."""
    if asked == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"inference.device: {asked} is not there; {torch.cuda.device_count()} GPU(s) found")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("inference.device: mps is not there on this machine")
    return device


def pick_precision(asked: str, device: torch.device) -> str:
    """auto: bf16 on a GPU that has it, else fp32."""
    if asked != "auto":
        return asked
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"


class TorchEmbedder:
    """An encoder that gives one vector a row.  Implements `tokenmill.backend.EmbedBackend`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        precision: str,
        recipe: EncoderRecipe,
        dimensions: int | None,
        num_prompt_tokens: int,
        pad_id: int,
        second_type: int = 0,
    ) -> None:
        self._device, self._recipe = device, recipe
        self._model = model.to(device=device).eval()
        self._dense = nn.Sequential(*(_load_dense(layer.folder, layer.activation) for layer in recipe.dense))
        self._dense.to(device=device).eval()
        self._skip = 0 if recipe.pools_prompt else num_prompt_tokens
        config = cast(Any, model).config
        # Subtle: a tokenizer may give types to a model that has none.
        self._second_type = second_type if (getattr(config, "type_vocab_size", 0) or 0) > second_type else 0
        hidden = int(getattr(config, "hidden_size", None) or config.d_model)
        full = _dense_width(self._dense, hidden)
        if dimensions is not None and dimensions > full:
            raise ConfigError(f"inference.dimensions: {dimensions} is more than the model's {full}")
        self.info = BackendInfo(
            model_type=config.model_type,
            num_parameters=sum(p.numel() for p in model.parameters()),
            device=str(device),
            precision=precision,
            pooling=recipe.pooling,
            normalized=recipe.normalize,
            dimensions=dimensions or full,
            pad_id=pad_id,
            default_batch_tokens=DEFAULT_BATCH_TOKENS[device.type],
        )

    def embed(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        pair_starts_B: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float32]:
        starts_B = None if pair_starts_B is None else torch.from_numpy(pair_starts_B)
        try:
            with torch.inference_mode():
                vectors_BD = self._forward(torch.from_numpy(ids_BL), torch.from_numpy(lengths_B), starts_B)
                return cast(npt.NDArray[np.float32], vectors_BD.cpu().numpy())
        except torch.OutOfMemoryError as exc:
            torch.cuda.empty_cache()
            raise OutOfMemoryError(f"batch of {ids_BL.shape[0]} x {ids_BL.shape[1]} tokens") from exc
        except (RuntimeError, IndexError) as exc:
            if any(words in str(exc) for words in OUT_OF_MEMORY):
                raise OutOfMemoryError(f"batch of {ids_BL.shape[0]} x {ids_BL.shape[1]} tokens") from exc
            raise BackendError(
                f"model failed on {ids_BL.shape[0]} x {ids_BL.shape[1]} tokens: {exc}"
            ) from exc

    def _forward(self, ids_BL: Tensor, lengths_B: Tensor, starts_B: Tensor | None) -> Tensor:
        places_L = torch.arange(ids_BL.shape[1])
        real_BL = places_L < lengths_B[:, None]
        types: dict[str, Tensor] = {}
        if starts_B is not None and self._second_type:
            second_BL = real_BL & (places_L >= starts_B[:, None])
            types["token_type_ids"] = (second_BL * self._second_type).to(self._device)
        padded = not bool(real_BL.all())
        ids_BL, real_BL = ids_BL.to(self._device), real_BL.to(self._device)
        # Subtle: without padding no mask is needed, and attention takes its fastest path.
        output = self._model(input_ids=ids_BL, attention_mask=real_BL.long() if padded else None, **types)
        pooled_BD = _pool(output.last_hidden_state, real_BL, self._recipe.pooling, self._skip)
        vectors_BD = self._dense(pooled_BD)[:, : self.info.dimensions]
        return nn.functional.normalize(vectors_BD, dim=1) if self._recipe.normalize else vectors_BD

    def device_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


def _pool(hidden_BLD: Tensor, real_BL: Tensor, mode: str, skip: int) -> Tensor:
    """One float32 vector a row from its real tokens, the first `skip` (a prompt's) left out."""
    if mode == "cls":
        # Subtle: with the prompt left out, sentence-transformers takes the first token after it.
        first_B = (real_BL.sum(dim=1) > skip) * skip
        return hidden_BLD[torch.arange(len(first_B), device=first_B.device), first_B].float()
    if mode == "last":
        last_B = real_BL.sum(dim=1) - 1
        return hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B].float()
    weights_BL1 = real_BL.clone()
    weights_BL1[:, :skip] = False
    weights_BL1 = weights_BL1[:, :, None].float()
    return (hidden_BLD.float() * weights_BL1).sum(dim=1) / weights_BL1.sum(dim=1).clamp(min=1e-9)


def _load_dense(folder: Path, activation: str) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    if activation not in ACTIVATIONS:
        raise ModelMismatchError(f"{folder}: activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if not path.is_file():
        raise ModelMismatchError(f"{path}: not there; tokenmill loads safetensors only")
    try:
        state = {name.removeprefix("linear."): tensor.float() for name, tensor in load_file(path).items()}
        linear = nn.Linear(state["weight"].shape[1], state["weight"].shape[0], bias="bias" in state)
        linear.load_state_dict(state)
    except (SafetensorError, OSError, KeyError, RuntimeError) as exc:
        raise ModelMismatchError(f"{path}: is not a linear layer: {first_line(exc)}") from exc
    return nn.Sequential(linear, ACTIVATIONS[activation]())


def _dense_width(dense: nn.Sequential, hidden: int) -> int:
    linears = [layer for layer in dense.modules() if isinstance(layer, nn.Linear)]
    return linears[-1].out_features if linears else hidden


@functools.lru_cache(maxsize=2)
def load_embedder(
    folder: Path,
    state: FolderState,  # noqa: ARG001 (what the cache goes by)
    *,
    device: str,
    precision: str,
    recipe: EncoderRecipe,
    dimensions: int | None,
    num_prompt_tokens: int,
    pad_id: int,
    second_type: int,
    threads: int | None,
    trust_remote_code: bool,
) -> TorchEmbedder:
    """Load a checkpoint once per process and state of its files; safetensors only, no network.

    state: `folder_state(folder)`.  Raises ModelNotFoundError, ModelMismatchError, ConfigError.
    """
    picked = pick_device(device)
    settled = pick_precision(precision, picked)
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    model = _load_model(folder, settled, trust_remote_code)
    try:
        return TorchEmbedder(
            model,
            device=picked,
            precision=settled,
            recipe=recipe,
            dimensions=dimensions,
            num_prompt_tokens=num_prompt_tokens,
            pad_id=pad_id,
            second_type=second_type,
        )
    except torch.OutOfMemoryError as exc:
        raise BackendUnavailableError(
            f"model {folder}: does not fit into the free memory of {picked}: {first_line(exc)}"
        ) from exc


def _load_model(folder: Path, precision: str, trust_remote_code: bool) -> nn.Module:
    transformers_logging.disable_progress_bar()
    if not any(folder.glob("*.safetensors")):
        raise ModelMismatchError(
            f"model {folder}: no .safetensors file; tokenmill does not load pickled weights"
        )
    try:
        model, report = AutoModel.from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            dtype=DTYPES[precision],
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as exc:  # whatever a damaged checkpoint provokes in foreign code
        raise ModelNotFoundError(f"model {folder}: cannot be loaded: {first_line(exc)}") from exc
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ModelMismatchError(f"model {folder}: weights are missing, the first is {missing[0]}")
    return cast(nn.Module, model)
