"""The one module that loads models onto a device: a transformers checkpoint under torch.

Only the values of each row come back from the device; what they are is the head's (`torch_heads`).
Legend: B rows of a batch, L longest row in tokens, V values of a row.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

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

from tokenmill.backend import BackendInfo, Values
from tokenmill.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    ModelMismatchError,
    ModelNotFoundError,
    OutOfMemoryError,
)
from tokenmill.model_files import EncoderRecipe, FolderState, first_line, read_json
from tokenmill.torch_heads import (
    Activation,
    EmbedHead,
    Head,
    Inputs,
    LabelHead,
    ScoreHead,
    check_token_logits,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_BATCH_TOKENS = {"cpu": 2048, "mps": 16_384, "cuda": 131_072}
MODEL_CLASSES: Mapping[str, Any] = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "rank": AutoModelForSequenceClassification,
    "score": AutoModelForCausalLM,
}

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


def device_memory(device: torch.device) -> int:
    """Bytes that the device has in all; of the CPU what this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is the word "max"
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine


class TorchBackend:
    """A model with the head of one task.  Implements `tokenmill.backend.Backend`."""

    def __init__(
        self,
        model: nn.Module,
        head: Head,
        *,
        device: torch.device,
        precision: str,
        pad_id: int,
        second_type: int = 0,
    ) -> None:
        self._device, self._model, self._head = device, model, head
        config = cast(Any, model).config
        # Subtle: a tokenizer may give types to a model that has none.
        self._second_type = second_type if (getattr(config, "type_vocab_size", 0) or 0) > second_type else 0
        self.info = BackendInfo(
            model_type=config.model_type,
            num_parameters=sum(p.numel() for p in model.parameters()),
            device=str(device),
            precision=precision,
            matmul=torch.get_float32_matmul_precision(),
            num_values=head.num_values,
            pad_id=pad_id,
            default_batch_tokens=DEFAULT_BATCH_TOKENS[device.type],
        )

    def run(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        starts_B: npt.NDArray[np.int64] | None = None,
    ) -> Values:
        starts = None if starts_B is None else torch.from_numpy(starts_B)
        try:
            with torch.inference_mode():
                inputs = self._inputs(torch.from_numpy(ids_BL), torch.from_numpy(lengths_B), starts)
                return cast(Values, self._head(self._model, inputs).cpu().numpy())
        except torch.OutOfMemoryError as exc:
            torch.cuda.empty_cache()
            raise OutOfMemoryError(f"batch of {ids_BL.shape[0]} x {ids_BL.shape[1]} tokens") from exc
        except (RuntimeError, IndexError) as exc:
            if any(words in str(exc) for words in OUT_OF_MEMORY):
                raise OutOfMemoryError(f"batch of {ids_BL.shape[0]} x {ids_BL.shape[1]} tokens") from exc
            raise BackendError(
                f"model failed on {ids_BL.shape[0]} x {ids_BL.shape[1]} tokens: {exc}"
            ) from exc

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

    def device_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


@functools.lru_cache(maxsize=2)
def load_backend(
    folder: Path,
    state: FolderState,  # noqa: ARG001 (what the cache goes by)
    *,
    task: str,
    device: str,
    precision: str,
    recipe: EncoderRecipe,
    dimensions: int | None,
    activation: Activation | None,
    num_prompt_tokens: int,
    pad_id: int,
    second_type: int,
    threads: int | None,
    trust_remote_code: bool,
) -> TorchBackend:
    """Load a checkpoint once per process and state of its files; safetensors only, no network.

    state: `folder_state(folder)`.  dimensions, recipe, num_prompt_tokens: of embed.
    activation: of classify and rank.  Raises ModelNotFoundError, ModelMismatchError, ConfigError.
    """
    picked = pick_device(device)
    settled = pick_precision(precision, picked)
    keep_freed_memory()
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32: TF32 keeps 10 bits of 23
    torch.backends.cudnn.allow_tf32 = False
    if threads:
        torch.set_num_threads(threads)
    model = _load_model(folder, task, settled, trust_remote_code)
    try:
        model = model.to(device=picked).eval()
        skip = 0 if recipe.pools_prompt else num_prompt_tokens
        head: Head
        if task == "embed":
            head = EmbedHead(recipe, _hidden_size(model), dimensions, skip, picked)
        elif task == "score":
            check_token_logits(model, picked, f"model {folder}")
            head = ScoreHead()
        else:
            assert activation is not None
            head = LabelHead(num_values=int(cast(Any, model).config.num_labels), activation=activation)
        return TorchBackend(
            model, head, device=picked, precision=settled, pad_id=pad_id, second_type=second_type
        )
    except torch.OutOfMemoryError as exc:
        raise BackendUnavailableError(
            f"model {folder}: does not fit into the free memory of {picked}: {first_line(exc)}"
        ) from exc


def _hidden_size(model: nn.Module) -> int:
    config = cast(Any, model).config
    return int(getattr(config, "hidden_size", None) or config.d_model)


def _model_class(folder: Path, task: str) -> Any:
    """Subtle: of a model with encoder and decoder, only the encoder gives vectors."""
    config = read_json(folder / "config.json") or {}
    cut = any(name.endswith("EncoderModel") for name in config.get("architectures") or [])
    encodes = task == "embed" and (cut or config.get("is_encoder_decoder"))
    return AutoModelForTextEncoding if encodes else MODEL_CLASSES[task]


def _load_model(folder: Path, task: str, precision: str, trust_remote_code: bool) -> nn.Module:
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
            trust_remote_code=trust_remote_code,
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
