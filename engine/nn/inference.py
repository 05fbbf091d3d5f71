"""Changes to a model for decoding: fused projections of the heads, and packed weights."""

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.layers import FusedLinear

MIN_PACKED_ELEMENTS = 2**18  # of a weight: smaller ones are read from a CPU's cache in any layout

Model = TypeVar("Model", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU, whose weight is in oneDNN's own layout.

    With few rows, the time of a product is that of reading the weight: packed at 30 to 40 GB/s, by
    F.linear at 7 to 20. Private operations, because a weight from the public ``to_mkldnn()`` needs
    its input converted too: 1.4 times the time in float32, 2 times in bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether a weight can be packed, and is large enough to gain from it."""
        is_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        is_dtype = weight.dtype in (torch.float32, torch.bfloat16)
        return is_cpu and is_dtype and weight.numel() >= MIN_PACKED_ELEMENTS


class FrozenLinear(nn.Module):
    """A linear layer for inference. Its tensors are buffers that are not saved."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return F.linear(x, self.weight, self.bias)


def for_decoding(model: Model, pack: bool = True) -> Model:
    """Copy a model for faster decoding with its present weights. The model itself is unchanged.

    The copy cannot train. The heads' projections are concatenated once, not in each call. On a CPU
    large weights are packed; use pack=False for a model that will be compiled. All other tensors
    are shared.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    decoder = copy.deepcopy(model, shared).eval()
    modules = list(decoder.modules())
    fused_layers: set[nn.Linear] = set()
    for module in modules:
        vars(module).pop("forward", None)  # compiled, or recomputing activations, for training
        if isinstance(module, FusedLinear):
            fused_layers.update(module.layers)
    for module in modules:
        for name, child in module.named_children():
            if isinstance(child, FusedLinear):
                weight, bias = child.concatenate()
                is_packed = pack and PackedLinear.supports(weight)
                make_linear = PackedLinear if is_packed else FrozenLinear
                setattr(module, name, make_linear(weight, bias))
            elif isinstance(child, nn.Linear) and child not in fused_layers and pack:
                setattr(module, name, pack_linear(child))
    if pack and decoder.head is None and PackedLinear.supports(decoder.head_weight()):
        decoder.head = PackedLinear(decoder.head_weight(), None)
    return decoder


def pack_linear(layer: nn.Linear) -> nn.Module:
    """The layer with its weight packed, or the layer itself where that is not supported."""
    if PackedLinear.supports(layer.weight):
        return PackedLinear(layer.weight, layer.bias)
    return layer
