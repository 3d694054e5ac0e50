"""What a checkpoint's config.json says of its head: whether it fits a task, and what its outputs mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelMismatchError
from tokenmill.model_files import read_json

HEADS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "classify": (("ForSequenceClassification",), "a classification head"),
    "rank": (("ForSequenceClassification",), "a classification head"),
    "score": (("ForCausalLM", "LMHeadModel"), "a causal language model's head"),
    "generate": (("ForCausalLM", "LMHeadModel"), "a causal language model's head"),
}


def check_head(folder: Path, task: str) -> None:
    """Raises ModelMismatchError for a checkpoint that config.json says was made for another task."""
    made_for = (read_json(folder / "config.json") or {}).get("architectures") or []
    endings, what = HEADS.get(task, ((), ""))
    if endings and made_for and not any(name.endswith(endings) for name in made_for):
        masked = "; it predicts masked tokens, not next ones" if "Masked" in made_for[0] else ""
        raise ModelMismatchError(
            f"model {folder}: {made_for[0]} has no head for task {task}{masked}; name a checkpoint with "
            f"{what} (...{endings[0]})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelRecipe:
    """What a classification head's outputs are called and how they become scores.

    several: a row may have more than one label.
    """

    names: tuple[str, ...]
    several: bool
    activation: str


def read_stop_ids(folder: Path) -> frozenset[int]:
    """The token or tokens that end a completion of a checkpoint; generation_config.json goes first."""
    for name in ("generation_config.json", "config.json"):
        found = (read_json(folder / name) or {}).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


ACTIVATIONS: Mapping[str, str] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def read_labels(folder: Path, task: str) -> LabelRecipe:
    """Names and activation of a checkpoint's classification head, from its config.json.

    Raises ModelMismatchError.  Source: the `text-classification` pipeline of transformers for classify,
    `CrossEncoder` of sentence-transformers for rank.
    """
    config = read_json(folder / "config.json") or {}
    given = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # what transformers leaves out
    names = tuple(str(given[number]) for number in sorted(given, key=int))
    if len(set(names)) < len(names):
        raise ModelMismatchError(f"model {folder}: two labels of id2label have one name")
    if task == "rank" and len(names) != 1:
        raise ModelMismatchError(
            f"model {folder}: rank needs a model with one output, this one has {len(names)} labels "
            f"({', '.join(names[:5])}); use task classify"
        )
    several = task == "classify" and config.get("problem_type") == "multi_label_classification"
    usual = "sigmoid" if several or len(names) == 1 else "softmax"
    return LabelRecipe(
        names=names, several=several, activation=_own_activation(config, folder) if task == "rank" else usual
    )


def _own_activation(config: Mapping[str, Any], folder: Path) -> str:
    stored = (config.get("sentence_transformers") or {}).get("activation_fn")
    stored = stored or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = stored.rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ModelMismatchError(f"model {folder}: activation {stored}; set inference.activation to override")
    return ACTIVATIONS[name]
