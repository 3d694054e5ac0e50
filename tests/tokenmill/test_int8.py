"""int8 layers against integers done by hand, and int8 models against their own float32."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_headed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from tokenmill import int8
from tokenmill.int8 import Int8Linear, num_parameters, quantize


@pytest.fixture(params=["kernel", "without"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's kernel where it is, and without it."""
    if request.param == "without":
        monkeypatch.setattr(int8, "_has_kernel", lambda: False)


def layer(inputs: int = 48, outputs: int = 20, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs)
    return nn.Linear(inputs, outputs, bias=bias)


@torch.inference_mode()
def by_hand(linear: nn.Linear, inputs_TI: Tensor) -> np.ndarray:
    """In float64 and Python's own way of rounding to even."""
    x_TI, w_OI = inputs_TI.numpy(), linear.weight.numpy()
    scale_O1 = np.abs(w_OI).max(axis=1, keepdims=True) / np.float32(127)
    low_T1 = x_TI.min(axis=1, keepdims=True)
    scale_T1 = np.maximum((x_TI.max(axis=1, keepdims=True) - low_T1) / np.float32(127), np.float32(1e-12))
    rounded_TI, rounded_OI = np.rint((x_TI - low_T1) / scale_T1), np.rint(w_OI / scale_O1)
    near_TI = rounded_TI.astype(np.float64) * scale_T1 + low_T1
    return near_TI @ (rounded_OI.astype(np.float64) * scale_O1).T + linear.bias.numpy()


@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_a_layer_is_the_product_of_its_rounded_numbers() -> None:
    linear = layer()
    rounded = Int8Linear(linear.weight, linear.bias)
    inputs_TI = torch.randn(33, 48) * 3 + 1
    np.testing.assert_allclose(rounded(inputs_TI).numpy(), by_hand(linear, inputs_TI), rtol=1e-5, atol=1e-5)
    assert (rounded(inputs_TI) - linear(inputs_TI)).abs().max() < 0.1
    shaped = rounded(inputs_TI.reshape(3, 11, 48))
    assert shaped.shape == (3, 11, 20)
    assert torch.equal(shaped.reshape(33, 20), rounded(inputs_TI))


@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_the_largest_numbers_do_not_overflow() -> None:
    linear = nn.Linear(2048, 4)
    linear.weight.data[:] = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]])
    inputs_TI = torch.full((3, 2048), 7.0)
    inputs_TI[:, 0] = -7.0
    exact = linear(inputs_TI)
    assert torch.allclose(Int8Linear(linear.weight, linear.bias)(inputs_TI), exact, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(num=st.integers(0, 9), seed=st.integers(0, 999))
@torch.inference_mode()
def test_a_token_has_its_own_scale(num: int, seed: int) -> None:
    torch.manual_seed(seed)
    linear = layer()
    rounded = Int8Linear(linear.weight, linear.bias)
    token_1I, others_TI = torch.randn(1, 48), 1000 * torch.randn(num, 48)
    beside = rounded(torch.cat([others_TI, token_1I]))[-1:]
    assert torch.equal(beside, rounded(token_1I))


@pytest.mark.usefixtures("kernel")
@torch.inference_mode()
def test_odd_numbers() -> None:
    linear = layer()
    rounded = Int8Linear(linear.weight, linear.bias)
    inputs_TI = torch.randn(5, 48)
    inputs_TI[0, 3], inputs_TI[1, 4] = float("nan"), float("inf")
    inputs_TI[2], inputs_TI[3] = 0, 2.5
    outputs_TO = rounded(inputs_TI)
    assert not outputs_TO[:2].isfinite().any()
    assert torch.allclose(outputs_TO[2], linear.bias)
    assert torch.allclose(outputs_TO[3], linear(inputs_TI[3]), atol=0.05)
    assert rounded(inputs_TI[:0]).shape == (0, 20)
    bare = layer(bias=False)
    assert torch.allclose(
        Int8Linear(bare.weight, None)(inputs_TI[4:]), bare(inputs_TI[4:]), atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("bert", AutoModelForSequenceClassification),
        ("gpt2", AutoModelForCausalLM),
        ("llama", AutoModelForCausalLM),
    ],
)
def test_the_trunk_is_rounded_and_the_head_is_not(tmp_path: Path, kind: str, auto: type) -> None:
    folder = make_headed(tmp_path / "model", kind, auto, vocab_size=400)
    model = auto.from_pretrained(folder).eval()
    rounded = deepcopy(model)
    quantize(rounded)
    left = [m for m in rounded.base_model.modules() if isinstance(m, nn.Linear | Conv1D)]
    heads = [m for m in rounded.modules() if isinstance(m, nn.Linear)]
    assert (left, len(heads)) == ([], 1)
    assert num_parameters(rounded) == num_parameters(model) == sum(p.numel() for p in model.parameters())
    ids_BL = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        exact, near = model(ids_BL).logits, rounded(ids_BL).logits
    assert not torch.equal(exact, near)
    assert torch.cosine_similarity(exact.flatten(), near.flatten(), dim=0) > 0.99
