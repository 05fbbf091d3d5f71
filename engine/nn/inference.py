"""Changes to a model for decoding: fused projections of the heads, and packed weights."""

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.layers import FusedLinear

MIN_PACKED_ELEMENTS = 2**18  # of a weight: smaller ones are read from a CPU's cache in any layout

Model = TypeVar("Model", bound=nn.Module)


class FrozenLinear(nn.Module):
    """A linear layer for inference, whose weight may be packed: in oneDNN's own layout.

    With few rows, the time of a product is that of reading the weight: packed at 30 to 40 GB/s, by
    F.linear at 7 to 20. Private operations, because a weight from the public ``to_mkldnn()`` needs
    its input converted too: 1.4 times the time in float32, 2 times in bfloat16.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, is_packed: bool):
        super().__init__()
        weight = weight.detach()
        if is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.is_packed = is_packed
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Return whether a weight can be packed, and is large enough to gain from it."""
    is_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    is_supported_dtype = weight.dtype in (torch.float32, torch.bfloat16)
    return is_cpu and is_supported_dtype and weight.numel() >= MIN_PACKED_ELEMENTS


def for_decoding(model: Model, pack: bool = True) -> Model:
    """Return a copy of a model that decodes faster, with its present weights.

    The copy cannot train. The heads' projections are concatenated once, not in each call. On a CPU
    large weights are packed; use pack=False for a model that will be compiled. All other tensors
    are shared.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    decoder = copy.deepcopy(model, shared).eval()
    modules = list(decoder.modules())
    fused_layers: set[nn.Linear] = set()
    to_pack: list[tuple[nn.Module, str, Tensor, Tensor | None]] = []
    for module in modules:
        vars(module).pop("forward", None)  # compiled, or recomputing activations, for training
        if isinstance(module, FusedLinear):
            fused_layers.update(module.layers)
    for module in modules:
        for name, child in module.named_children():
            if isinstance(child, FusedLinear):
                weight, bias = child.concatenate()
                setattr(module, name, FrozenLinear(weight, bias, pack and can_pack(weight)))
            elif isinstance(child, nn.Linear) and child not in fused_layers:
                to_pack.append((module, name, child.weight, child.bias))
    if decoder.head is None:
        to_pack.append((decoder, "head", decoder.head_weight(), None))
    for module, name, weight, bias in to_pack:
        if pack and can_pack(weight):
            setattr(module, name, FrozenLinear(weight, bias, True))
    return decoder
