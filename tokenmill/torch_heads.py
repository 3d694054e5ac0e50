"""What each task makes of a model's states, on the device: one row of values a text.

Legend: B rows of a batch, L longest row in tokens, D width of the model, V values of a row,
N predicted tokens of a batch, K size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from tokenmill.errors import ConfigError, ModelMismatchError
from tokenmill.model_files import EncoderRecipe, first_line

ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}
LOGITS_AT_ONCE = 32 << 20
PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A batch on the device.

    real_BL: which tokens are not padding.  later_BL: which are not before the `starts_B` of `Backend.run`.
    """

    ids_BL: Tensor
    real_BL: Tensor
    types_BL: Tensor | None = None
    later_BL: Tensor | None = None

    def for_model(self) -> dict[str, Tensor | None]:
        """Subtle: without padding no mask is needed, and attention takes its fastest path."""
        types = {} if self.types_BL is None else {"token_type_ids": self.types_BL}
        mask_BL = None if bool(self.real_BL.all()) else self.real_BL.long()
        return {"input_ids": self.ids_BL, "attention_mask": mask_BL, **types}

    @property
    def last_B(self) -> Tensor:  # noqa: N802 (a shape suffix)
        """Place of each row's last token."""
        return self.real_BL.sum(dim=1) - 1


class Head(Protocol):
    """The last step of a task. num_values: V."""

    num_values: int

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The values of each row, (B, V), float32 or float64."""
        ...


# --- embed ---


class EmbedHead:
    """Pools token states to one vector, as the model's recipe says."""

    def __init__(
        self, recipe: EncoderRecipe, hidden: int, dimensions: int | None, skip: int, device: torch.device
    ) -> None:
        self._recipe, self._skip = recipe, skip
        layers = (_load_dense(layer.folder, layer.activation) for layer in recipe.dense)
        self._dense = nn.Sequential(*layers).to(device=device).eval()
        full = _dense_width(self._dense, hidden)
        if dimensions is not None and dimensions > full:
            raise ConfigError(f"inference.dimensions: {dimensions} is more than the model's {full}")
        self.num_values = dimensions or full

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        hidden_BLD = model(**inputs.for_model()).last_hidden_state
        pooled_BD = _pool(hidden_BLD, inputs, self._recipe.pooling, self._skip)
        vectors_BD = self._dense(pooled_BD)[:, : self.num_values]
        return nn.functional.normalize(vectors_BD, dim=1) if self._recipe.normalize else vectors_BD


def _pool(hidden_BLD: Tensor, inputs: Inputs, mode: str, skip: int) -> Tensor:
    """One float32 vector a row from its real tokens, the first `skip` (a prompt's) left out."""
    if mode == "cls":
        # Subtle: with the prompt left out, sentence-transformers takes the first token after it.
        return _rows_at(hidden_BLD, (inputs.last_B >= skip) * skip).float()
    if mode == "last":
        return _rows_at(hidden_BLD, inputs.last_B).float()
    weights_BL1 = inputs.real_BL.clone()
    weights_BL1[:, :skip] = False
    weights_BL1 = weights_BL1[:, :, None].float()
    return (hidden_BLD.float() * weights_BL1).sum(dim=1) / weights_BL1.sum(dim=1).clamp(min=1e-9)


def _rows_at(hidden_BLD: Tensor, places_B: Tensor) -> Tensor:
    """One state a row."""
    return hidden_BLD[torch.arange(len(places_B), device=places_B.device), places_B]


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


# --- classify, rank ---

Activation = Literal["softmax", "sigmoid", "none"]
PROBABILITIES: Mapping[Activation, Any] = {
    "softmax": lambda logits_BV: logits_BV.softmax(dim=1),
    "sigmoid": torch.sigmoid,
    "none": lambda logits_BV: logits_BV,
}


@dataclass(kw_only=True, slots=True)
class LabelHead:
    """One score a label, from the checkpoint's own classification head."""

    num_values: int
    activation: Activation

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        scores_BV: Tensor = PROBABILITIES[self.activation](_label_logits(model, inputs).float())
        return scores_BV


def _label_logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Subtle: decoders classify by their last token, which transformers finds by its id not being that
    of padding; a text may end with that very token.
    """
    head = getattr(model, "score", None)
    if isinstance(head, nn.Linear):
        hidden_BLD = cast(Any, model).base_model(**inputs.for_model()).last_hidden_state
        return cast(Tensor, head(_rows_at(hidden_BLD, inputs.last_B)))
    return cast(Tensor, model(**inputs.for_model()).logits)


# --- score ---


@dataclass(slots=True)
class ScoreHead:
    """Sum of the negative log-likelihoods of a row's tokens but the first, and how many they are.

    Of a chunk, those of its new tokens alone: the others are context.

    The (B, L, K) logits are never held at once: a bounded number of tokens is predicted at a time.
    """

    num_values: int = field(default=2, init=False)

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        hidden_BLD = cast(Any, model).base_model(**inputs.for_model()).last_hidden_state
        counted_BL = inputs.real_BL if inputs.later_BL is None else inputs.real_BL & inputs.later_BL
        predicted_BL = counted_BL[:, 1:]
        hidden_ND, targets_N = hidden_BLD[:, :-1][predicted_BL], inputs.ids_BL[:, 1:][predicted_BL]
        rows_N = predicted_BL.nonzero()[:, 0].cpu()
        sums_B = torch.zeros(len(predicted_BL), dtype=torch.float64)
        step = max(16, LOGITS_AT_ONCE // output_size(model))
        for start in range(0, len(targets_N), step):
            chosen = slice(start, start + step)
            logits_NK = token_logits(model, hidden_ND[chosen]).float()
            right_N = logits_NK.gather(1, targets_N[chosen, None])[:, 0]
            sums_B.index_add_(0, rows_N[chosen], (logits_NK.logsumexp(dim=1) - right_N).double().cpu())
        return torch.stack([sums_B, predicted_BL.sum(dim=1).double().cpu()], dim=1)


def output_size(model: nn.Module) -> int:
    """K."""
    return int(cast(Any, model).get_output_embeddings().weight.shape[0])


def token_logits(model: nn.Module, hidden_ND: Tensor) -> Tensor:
    """What a causal model makes of states, (N, K): its output layer, scaled and capped as its kind does."""
    config = cast(Any, model).config.get_text_config()
    logits_NK: Tensor = cast(Any, model).get_output_embeddings()(hidden_ND)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits_NK = logits_NK * scale
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits_NK = logits_NK / divisor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits_NK = torch.tanh(logits_NK / cap) * cap
    return logits_NK


def check_token_logits(model: nn.Module, device: torch.device, what: str) -> None:
    """Raises ModelMismatchError for a model whose logits are made in a way that tokenmill does not know."""
    ids_BL = (torch.arange(PROBE_TOKENS, device=device) % output_size(model))[None]
    with torch.inference_mode():
        whole_LK = cast(Any, model)(input_ids=ids_BL).logits[0].float()
        ours_LK = token_logits(model, cast(Any, model).base_model(input_ids=ids_BL).last_hidden_state[0])
    if ours_LK.shape != whole_LK.shape or not torch.allclose(ours_LK.float(), whole_LK, rtol=1e-2, atol=1e-2):
        raise ModelMismatchError(f"{what}: its logits are more than its output layer's; it cannot be scored")
