"""Dynamic int8 for CPUs: linear layers whose weights have 8 bits, with a scale an output, and whose inputs
have 7, with a scale and an offset a token.

Inputs have 7 bits because CPUs without VNNI add products of two of them in 16 bits: so no sum overflows, and
every CPU makes the same of a token, whatever stands beside it in a batch.
Legend: T tokens, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

LARGEST = 127  # of a rounded weight, on both sides of 0, and of a rounded input, from 0
SMALLEST_SCALE = 1e-12  # where all numbers are one


class Int8Linear(nn.Module):
    """x W^T + b, (..., I) -> (..., O), the product in integers.

    Of a token with a NaN or an infinity all outputs are NaN or infinite.
    """

    weight: Tensor
    scale_O: Tensor
    sums_O: Tensor

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        weight_OI = weight_OI.detach().float().contiguous()  # the kernel ignores strides
        scale_O = weight_OI.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / LARGEST
        rounded_OI = (weight_OI / scale_O[:, None]).round().to(torch.int8)
        self.bias = None if bias_O is None else nn.Parameter(bias_O.detach().float(), requires_grad=False)
        self.num_weights = weight_OI.numel()
        self.register_buffer("scale_O", scale_O)
        self.register_buffer("sums_O", rounded_OI.sum(dim=1) * scale_O)
        self.register_buffer("zeros_O", torch.zeros(len(scale_O), dtype=torch.int64))
        self.register_buffer("weight", rounded_OI)
        if _has_kernel():
            self.register_buffer("weight", torch.ops.onednn.qlinear_prepack(rounded_OI, None))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs_TI = inputs.reshape(-1, inputs.shape[-1])
        low_T1 = inputs_TI.amin(dim=1, keepdim=True)  # aminmax takes 5 to 10 times as long
        scale_T1 = ((inputs_TI.amax(dim=1, keepdim=True) - low_T1) / LARGEST).clamp_(min=SMALLEST_SCALE)
        rounded_TI = (inputs_TI - low_T1).div_(scale_T1).round_()
        outputs_TO = self._product(rounded_TI).mul_(scale_T1).addcmul_(low_T1, self.sums_O)
        if self.bias is not None:
            outputs_TO.add_(self.bias)
        return outputs_TO.view(*inputs.shape[:-1], outputs_TO.shape[1])

    def _product(self, rounded_TI: Tensor) -> Tensor:
        """Times the weight, each output scaled."""
        if not _has_kernel():
            return torch._int_mm(rounded_TI.to(torch.int8), self.weight.t()) * self.scale_O
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded_TI.to(torch.uint8),
            *(1.0, 0),  # scale and zero point of the inputs
            *(self.weight, self.scale_O, self.zeros_O),
            None,  # bias
            *(1.0, 0, torch.float32),  # scale, zero point and type of the outputs
            *("none", [], ""),  # what comes after
        )
        return product


def _has_kernel() -> bool:
    """Whether torch was built with oneDNN's integer layers; without them the same comes out, slowly."""
    return hasattr(torch.ops.onednn, "qlinear_prepack") and bool(torch._C._has_mkldnn)


def num_parameters(model: nn.Module) -> int:
    """Of a model whose linear layers may be int8."""
    rounded = sum(layer.num_weights for layer in model.modules() if isinstance(layer, Int8Linear))
    return rounded + sum(parameter.numel() for parameter in model.parameters())


def quantize(model: nn.Module) -> None:
    """Replace the linear layers of a model's trunk, in place; heads and embeddings stay in float32."""
    _replace_linears(cast(Any, model).base_model)


def _replace_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, Conv1D):  # GPT-2's, which holds its weight transposed
            setattr(module, name, Int8Linear(child.weight.t(), child.bias))
        elif isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child.weight, child.bias))
        else:
            _replace_linears(child)
