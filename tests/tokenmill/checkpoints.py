"""Small checkpoints with random weights, saved as sentence-transformers saves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from outputs import MINILM
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, Qwen2Config, Qwen2Model, RobertaConfig, RobertaModel

from tokenmill.model_files import resolve_model

WIDTH = 32
SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 30522,
}
PREFIX = "sentence_transformers.models."


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def make_checkpoint(
    folder: Path,
    *,
    kind: str = "bert",
    pooling: str = "mean",
    normalize: bool = False,
    dense: list[tuple[int, str]] | None = None,
    include_prompt: bool = True,
    max_tokens: int = 48,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    **settings: Any,
) -> Path:
    """A model with MiniLM's tokenizer and random weights, the same ones each time.

    dense: (width, activation) of each linear layer after pooling.
    """
    torch.manual_seed(7)
    if kind == "bert":
        model: Any = BertModel(BertConfig(**SMALL, max_position_embeddings=64))
    elif kind == "roberta":
        model = RobertaModel(RobertaConfig(**SMALL, max_position_embeddings=66, pad_token_id=1))
    else:
        model = Qwen2Model(Qwen2Config(**SMALL, num_key_value_heads=2, max_position_embeddings=64))
    model.save_pretrained(folder, safe_serialization=True)
    source = resolve_model(MINILM)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder)
    _write(folder / "1_Pooling" / "config.json", _pooling(pooling, include_prompt))
    kinds = ["Transformer", "Pooling"]
    width = WIDTH
    for number, (out, activation) in enumerate(dense or [], start=2):
        place = folder / f"{number}_Dense"
        config = {
            "in_features": width,
            "out_features": out,
            "bias": True,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        _write(place / "config.json", config)
        weights = {"linear.weight": torch.randn(out, width) / width**0.5, "linear.bias": torch.randn(out)}
        save_file(weights, place / "model.safetensors")
        kinds.append("Dense")
        width = out
    if normalize:
        kinds.append("Normalize")
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(kinds[1:], start=1))]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": PREFIX + name}
        for n, (name, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, **settings})
    texts = {"prompts": prompts or {}, "default_prompt_name": default_prompt}
    _write(folder / "config_sentence_transformers.json", texts)
    return folder


def _pooling(mode: str, include_prompt: bool) -> dict[str, Any]:
    names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}
    flags = {f"pooling_mode_{name}": mode == key for key, name in names.items()}
    return {"word_embedding_dimension": WIDTH, **flags, "include_prompt": include_prompt}
