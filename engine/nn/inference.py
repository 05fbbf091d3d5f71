"""Changes to a model that only predicts: one query, key and value layer for all heads, packed weights."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH_PACKING = 2**18  # elements of a weight; measured, smaller ones come from the processor's cache in any layout


class PackedLinear(nn.Module):
    """A linear layer that only predicts, on a CPU: oneDNN keeps its weight in the order in which it reads it.

    With few rows a product costs reading its weight: 30 to 40 GB/s, F.linear 7 to 20, measured on 2 cores of a Zen 4.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether there is such a layer for this weight, and it pays."""
        known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        return known and weight.numel() >= WORTH_PACKING and torch.backends.mkldnn.is_available()


def for_decoding(model: nn.Module, pack: bool = True) -> nn.Module:
    """A copy of a model that decodes sooner and only predicts, with the weights of now; the model stays as it is.

    Heads' weights, else joined at each call, are joined once (where there is ``join_heads()`` there is ``joined``). On
    a CPU large weights are packed, but for a model to be compiled (pack=False). All else is shared.
    """
    decoder = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
    for module in [module for module in decoder.modules() if hasattr(module, "join_heads")]:
        weight, bias = (None if joined is None else joined.detach() for joined in module.join_heads())
        packed = pack and PackedLinear.fits(weight)
        module.joined = PackedLinear(weight, bias) if packed else partial(F.linear, weight=weight, bias=bias)
    if pack and decoder.head is None and PackedLinear.fits(decoder.head_weight()):
        decoder.head = PackedLinear(decoder.head_weight(), None)
    for parent in [module for module in decoder.modules() if pack and not hasattr(module, "query")]:  # a head is joined
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and PackedLinear.fits(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return decoder
