"""Changes to a model for decoding: fast products and rotations."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.layers import FusedLinear, concatenate_linear, is_plain_linear
from engine.nn.positions import RotationTable

MAX_INT8 = 127
MIN_SCALE = 1e-30  # of the weights of an output that are all zero
MAX_CACHED_PARAMETERS = 4_000_000  # of a model whose weights stay in a CPU's cache

Model = TypeVar("Model", bound=nn.Module)


class PlainLinear(nn.Module):
    """A linear layer for inference, with its weight in the plain layout.

    Compiled for one row on a CPU, it is a reduction, which reads the weight faster than a product.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, inputs) → (…, outputs)."""
        is_compiling = torch.compiler.is_compiling()
        if not (is_compiling and x.device.type == "cpu" and x.shape[:-1].numel() == 1):
            return F.linear(x, self.weight, self.bias)
        y = (self.weight * x.flatten()).sum(dim=-1)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


class PackedLinear(PlainLinear):
    """A linear layer for inference on a CPU, with its weight in the layout of oneDNN's products.

    They read it faster than F.linear reads the plain layout. The operations are private because the
    public ``to_mkldnn()`` also needs its input converted: docs/architecture.md.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, inputs) → (…, outputs)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """A linear layer for inference on a CPU, with 8-bit weights and a scale for each output.

    A product also quantizes its input to 8 bits, with one scale for all rows. It reads half as many
    bytes of weights as in bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        weight = weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp(min=MIN_SCALE) / MAX_INT8
        zero_points = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated, without a successor
            quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
        bias = None if bias is None else bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack(quantized, bias)
        # x86 processors without VNNI add two products in 16 bits, which 8-bit inputs overflow.
        capabilities = torch.cpu.get_capabilities()
        has_vnni = capabilities.get("avx512_vnni") or capabilities.get("avx_vnni")
        self.is_input_7_bits = capabilities.get("architecture") == "x86_64" and not has_vnni

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, inputs) → (…, outputs)."""
        y = torch.ops.quantized.linear_dynamic(x.float(), self.packed, self.is_input_7_bits)
        return y.to(x.dtype)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this CPU has oneDNN's products with packed weights of a dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:  # they need AVX-512BW or AVX-NE-CONVERT
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def build_decoder(model: Model, quantize: bool = False) -> Model:
    """Return a copy of a model that decodes faster, with its current weights.

    The copy cannot train. The heads' projections are concatenated once, not in each call. On a CPU
    large weights are packed, and rotations computed once. With quantize, the linear layers have
    8-bit weights. A layer with hooks, or of another class than nn.Linear, is called as it is. All
    other tensors are shared.
    """
    memo = {id(parameter): parameter for parameter in model.parameters()}  # not copied
    decoder: Any = copy.deepcopy(model, memo).eval()
    for module in decoder.modules():
        vars(module).pop("forward", None)  # compiled, or recomputing activations, for training
    head_weight = decoder.head_weight()
    is_cpu = head_weight.device.type == "cpu"
    is_large = decoder.num_parameters > MAX_CACHED_PARAMETERS
    convert: Callable[[Tensor, Tensor | None], nn.Module] = PlainLinear
    if quantize:
        convert = Int8Linear
    elif is_cpu and is_large and can_pack(head_weight.dtype):
        convert = PackedLinear
    fused_layers: set[nn.Module] = set()
    for name, module in [*decoder.named_modules()]:
        if isinstance(module, FusedLinear) and decoder.config.attention == "fused":
            concatenated = concatenate_linear(module.get_layers())
            if concatenated:
                decoder.set_submodule(name, convert(*concatenated))
                fused_layers.update(module.get_layers())
    for name, module in [*decoder.named_modules()]:
        if is_plain_linear(module) and module not in fused_layers:
            decoder.set_submodule(name, convert(module.weight, module.bias))
    if decoder.head is None:
        decoder.head = convert(head_weight, None)
    if is_cpu and decoder.config.position == "rope":
        decoder.rotation = RotationTable(decoder.rotation)
    return decoder
