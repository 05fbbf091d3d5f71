"""Changes to a model for decoding: fast products, norms and rotations."""

import copy
import math
import warnings
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.layers import FusedLinear, RMSNorm
from engine.nn.positions import RotationTable

MAX_INT8 = 127
MIN_SCALE = 1e-30  # of the weights of an output that are all zero
MAX_MKL_ROWS_ON_INTEL = 2  # of a product: with more rows, oneDNN is faster
# MKL also starts faster than oneDNN, which counts where all weights stay in the CPU's cache: on
# other processors it is faster up to these numbers of parameters and of multiplications.
MAX_CACHED_PARAMETERS = 4_000_000
MAX_MKL_MULTIPLICATIONS = 500_000

Model = TypeVar("Model", bound=nn.Module)


class FrozenLinear(nn.Module):
    """A linear layer for inference that uses a CPU's fastest product for the number of rows.

    oneDNN reads its packed layout faster than F.linear reads the plain one. With few rows in
    float32, F.linear, by MKL, may still be faster, and needs the plain layout. The operations are
    private because the public ``to_mkldnn()`` also needs its input converted: docs/architecture.md.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, use_onednn: bool, is_cached: bool = False
    ):
        """Use a weight (outputs, inputs) that stays in the CPU's cache, or does not."""
        super().__init__()
        weight = weight.detach()
        self.use_onednn = use_onednn
        self.max_mkl_rows = max_mkl_rows(weight, is_cached)
        if use_onednn and self.max_mkl_rows == 0:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, inputs) → (…, outputs)."""
        if self.use_onednn and x.shape[:-1].numel() > self.max_mkl_rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class FrozenRMSNorm(nn.Module):
    """Root-mean-square norm for inference, computed in float32: x · scale / hypot(‖x‖, √(n ε))."""

    scale: Tensor
    floor: Tensor

    def __init__(self, norm: RMSNorm):
        super().__init__()
        root = torch.tensor(math.sqrt(norm.normalized_shape[0]))
        scale = root if norm.weight is None else root * norm.weight.detach().float()
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("floor", root * math.sqrt(norm.eps or 0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: (…, width) → (…, width)."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self.scale / torch.hypot(length, self.floor)).to(x.dtype)


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


def max_mkl_rows(weight: Tensor, is_cached: bool) -> int:
    """Return up to how many rows MKL's product with a weight is faster than oneDNN's."""
    if not torch.backends.mkl.is_available() or weight.dtype != torch.float32:
        return 0
    is_intel = "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")
    num_rows = MAX_MKL_ROWS_ON_INTEL if is_intel else 0
    return max(num_rows, MAX_MKL_MULTIPLICATIONS // weight.numel()) if is_cached else num_rows


def runs_on_cpu(weight: Tensor) -> bool:
    """Return whether a weight is on a CPU, in a dtype that the layers for decoding support."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def build_decoder(model: Model, pack: bool = True, quantize: bool = False) -> Model:
    """Return a copy of a model that decodes faster, with its current weights.

    The copy cannot train. The heads' projections are concatenated once, not in each call. On a CPU
    weights are packed, and norms and rotations have fewer operations: use pack=False for a model
    that will be compiled. With quantize, the linear layers have 8-bit weights. All other tensors
    are shared.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    decoder: Any = copy.deepcopy(model, shared).eval()
    modules = list(decoder.modules())
    fused_layers: set[nn.Linear] = set()
    for module in modules:
        vars(module).pop("forward", None)  # compiled, or recomputing activations, for training
        if isinstance(module, FusedLinear):
            fused_layers.update(module.layers)
    has_cpu_layers = pack and runs_on_cpu(decoder.head_weight())
    use_onednn = has_cpu_layers and torch.backends.mkldnn.is_available()
    is_cached = decoder.num_parameters <= MAX_CACHED_PARAMETERS

    def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if quantize:
            return Int8Linear(weight, bias)
        return FrozenLinear(weight, bias, use_onednn, is_cached)

    for module in modules:
        for name, child in module.named_children():
            if isinstance(child, FusedLinear):
                setattr(module, name, make_linear(*child.concatenate()))
            elif isinstance(child, nn.Linear) and (quantize or use_onednn):
                if child not in fused_layers:
                    setattr(module, name, make_linear(child.weight, child.bias))
            elif isinstance(child, RMSNorm) and has_cpu_layers:
                setattr(module, name, FrozenRMSNorm(child))
    if decoder.head is None and (quantize or use_onednn):
        decoder.head = make_linear(decoder.head_weight(), None)
    if has_cpu_layers and decoder.config.position == "rope":
        decoder.rotation = RotationTable(decoder.rotation)
    if has_cpu_layers:
        for block in decoder.blocks:
            head = block.attention.heads[0]
            block.attention.qk_norms = (head.query_norm, head.key_norm)
    return decoder
