"""Changes to a model for decoding: fused projections of the heads, and fast products."""

import copy
import warnings
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.layers import FusedLinear

MAX_INT8 = 127
MIN_SCALE = 1e-30  # of the weights of an output that are all zero
MIN_ONEDNN_ELEMENTS = 2**18  # of a weight: smaller ones are read from a CPU's cache in any layout
MAX_MKL_ROWS = 2  # of a product: with more rows, oneDNN is faster

Model = TypeVar("Model", bound=nn.Module)


class FrozenLinear(nn.Module):
    """A linear layer for inference that uses a CPU's fastest product for the number of rows.

    With few rows, reading the weight takes most of the time. oneDNN reads its packed layout faster
    than F.linear reads the plain one. On Intel's processors, MKL's product of one or two rows in
    float32 is faster still, and needs the plain layout. The operations are private because the
    public ``to_mkldnn()`` also needs its input converted: docs/architecture.md.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, use_onednn: bool):
        super().__init__()
        weight = weight.detach()
        self.use_onednn = use_onednn
        self.max_mkl_rows = MAX_MKL_ROWS if prefers_mkl(weight) else 0
        if use_onednn and not self.max_mkl_rows:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, inputs) → (…, outputs)."""
        if self.use_onednn and x.shape[:-1].numel() > self.max_mkl_rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


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


def prefers_mkl(weight: Tensor) -> bool:
    """Return whether MKL reads a weight faster than oneDNN in products with few rows."""
    is_intel = "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")
    return is_intel and torch.backends.mkl.is_available() and weight.dtype == torch.float32


def can_use_onednn(weight: Tensor) -> bool:
    """Return whether oneDNN supports a weight that is large enough to gain from it."""
    is_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    is_supported_dtype = weight.dtype in (torch.float32, torch.bfloat16)
    return is_cpu and is_supported_dtype and weight.numel() >= MIN_ONEDNN_ELEMENTS


def for_decoding(model: Model, pack: bool = True, quantize: bool = False) -> Model:
    """Return a copy of a model that decodes faster, with its current weights.

    The copy cannot train. The heads' projections are concatenated once, not in each call. On a CPU
    large weights are packed; use pack=False for a model that will be compiled. With quantize, the
    linear layers have 8-bit weights. All other tensors are shared.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    decoder = copy.deepcopy(model, shared).eval()
    modules = list(decoder.modules())
    fused_layers: set[nn.Linear] = set()
    for module in modules:
        vars(module).pop("forward", None)  # compiled, or recomputing activations, for training
        if isinstance(module, FusedLinear):
            fused_layers.update(module.layers)

    def should_replace(weight: Tensor) -> bool:
        return quantize or (pack and can_use_onednn(weight))

    def frozen(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if quantize:
            return Int8Linear(weight, bias)
        return FrozenLinear(weight, bias, should_replace(weight))

    for module in modules:
        for name, child in module.named_children():
            if isinstance(child, FusedLinear):
                setattr(module, name, frozen(*child.concatenate()))
            elif isinstance(child, nn.Linear):
                is_fused = child in fused_layers
                if not is_fused and should_replace(child.weight):
                    setattr(module, name, frozen(child.weight, child.bias))
    if decoder.head is None and should_replace(decoder.head_weight()):
        decoder.head = frozen(decoder.head_weight(), None)
    return decoder
