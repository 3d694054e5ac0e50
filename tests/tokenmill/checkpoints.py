"""Small checkpoints with random weights, saved as sentence-transformers saves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from outputs import MINILM
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    RobertaConfig,
    RobertaModel,
)

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
    copy_tokenizer(folder)
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


def copy_tokenizer(folder: Path) -> None:
    """MiniLM's."""
    source = resolve_model(MINILM)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder)


TEXTS = [
    "the quick brown fox",
    "aaaa ____ abab",
    "1234 12345678",
    "你好 é 😀 שלום",
    "def f(x):\n    return x",
] * 8


def train_tokenizer(folder: Path, **special: str) -> None:
    """A small byte-level BPE without a template, as GPT-2's: no padding token unless `special` names one."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer, trained.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", *special.values()],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>", **special)
    fast.save_pretrained(folder)


# What a small model of each kind is called in its configuration, where it is not as in SMALL.
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 64},
    "roberta": {"max_position_embeddings": 66, "pad_token_id": 1},
    "distilbert": {
        "dim": WIDTH,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 64,
    },
    "mpnet": {"max_position_embeddings": 66, "pad_token_id": 1},
    "modernbert": {"max_position_embeddings": 64, "global_attn_every_n_layers": 2, "local_attention": 8},
    "gpt2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {"num_key_value_heads": 2, "max_position_embeddings": 64},
    "qwen3": {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8},
    "gemma": {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "sliding_window": 16},
    "granite": {"num_key_value_heads": 2, "max_position_embeddings": 64, "logits_scaling": 3.0},
    "cohere": {"num_key_value_heads": 2, "max_position_embeddings": 64, "logit_scale": 0.25},
    "mamba": {},
    "t5": {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}


def make_headed(folder: Path, kind: str, auto_class: Any, **settings: Any) -> Path:
    """A small model of a kind with the head of an Auto class, random weights, the same ones each time."""
    torch.manual_seed(7)
    own = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**SMALL, **own, **SHAPES[kind], **settings})
    model = auto_class.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():  # far enough from zero that a wrong row shows
            weights.add_(torch.randn(weights.shape) * 0.05)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def _pooling(mode: str, include_prompt: bool) -> dict[str, Any]:
    names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}
    flags = {f"pooling_mode_{name}": mode == key for key, name in names.items()}
    return {"word_embedding_dimension": WIDTH, **flags, "include_prompt": include_prompt}
