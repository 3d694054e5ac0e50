"""How large a checkpoint is and what memory it will take, from its headers; no weights are read, no torch.

Estimates are for deciding whether a model fits a device at all, not for packing it to the brim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelMismatchError
from tokenmill.model_files import first_line, read_json, read_limits

BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 4}  # int8 is made of float32 at load
STATES_HELD = 8  # of a layer at once: residual, attention's four, norms and copies, each as wide as the model


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What config.json and the headers of the weights say. stored_as: type of most weights, as "F32"."""

    architecture: str
    num_parameters: int
    stored_as: str
    positions: int | None
    hidden: int
    inner: int


def read_size(folder: Path) -> ModelSize:
    """Raises ModelMismatchError for a folder without readable safetensors."""
    from safetensors import SafetensorError, safe_open

    config = read_json(folder / "config.json") or {}
    text = config.get("text_config") or config
    numbers: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    piece = file.get_slice(name)
                    numbers[piece.get_dtype()] += math.prod(piece.get_shape())
        except (SafetensorError, OSError) as exc:
            raise ModelMismatchError(f"{path}: not readable as safetensors: {first_line(exc)}") from exc
    if not numbers:
        raise ModelMismatchError(
            f"model {folder}: no .safetensors file; tokenmill does not load pickled weights"
        )
    hidden = _hidden(text)
    inner = text.get("intermediate_size") or text.get("hidden_dim") or text.get("d_ff") or text.get("n_inner")
    return ModelSize(
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        num_parameters=numbers.total(),
        stored_as=numbers.most_common(1)[0][0],
        positions=read_limits(folder).positions,
        hidden=hidden,
        inner=int(inner or 4 * hidden),
    )


def _hidden(config: Mapping[str, Any]) -> int:
    """Width of the model, by the names it goes by."""
    names = ("hidden_size", "n_embd", "d_model", "dim")
    return int(next((config[name] for name in names if config.get(name)), 0))


def cache_bytes(folder: Path, precision: str) -> int:
    """Keys and values of one token in all layers, by config.json; an upper bound where it says nothing."""
    config = read_json(folder / "config.json") or {}
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    layers = int(text.get("num_hidden_layers") or text.get("n_layer") or 1)
    width = int(text.get("head_dim") or _hidden(text) // heads)
    return 2 * layers * int(text.get("num_key_value_heads") or heads) * width * BYTES[precision]


def memory_bytes(size: ModelSize, precision: str, batch_tokens: int, extra_bytes: int = 0) -> int:
    """About what the weights and one batch take on the device.

    extra_bytes: of the task's head, such as the logits that are held at once.
    """
    width = BYTES[precision]
    states = batch_tokens * (STATES_HELD * size.hidden + 2 * size.inner) * width
    return size.num_parameters * width + states + extra_bytes
