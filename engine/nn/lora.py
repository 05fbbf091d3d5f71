"""LoRA: low-rank updates of frozen linear layers, added to a model from outside.

Hu et al. 2021, and Schulman et al. 2025, "LoRA Without Regret": the linear layers of all blocks.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.layers import FusedLinear, concatenate_linear, is_plain_linear
from engine.nn.specs import ParameterSpec

A_NAME = "lora.A"  # of parameters, after the name of the layer
B_NAME = "lora.B"
LORA_ALPHA = 32.0  # of PEFT: see lora_scale
HEAD_PATTERN = re.compile(r"heads\.(\d+)\.")
TOKEN_PARAMETERS = ("token_embedding.weight", "head.weight")


class LowRankUpdate(nn.Module):
    """An update B A of a linear layer's weight, of rank r."""

    def __init__(self, num_inputs: int, num_outputs: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, num_inputs))
        self.B = nn.Parameter(torch.empty(num_outputs, rank))


class LoRALinear(nn.Module):
    """A frozen linear layer with a low-rank path beside it.

    The layers of all heads' queries, keys or values share one A, and each has some rows of B.
    """

    def __init__(self, layer: nn.Linear, update: LowRankUpdate, rows: slice = slice(None)):
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.path = (update, rows)  # in a tuple, it is not a submodule of every head

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, inputs) → (…, outputs)."""
        update, rows = self.path
        x = to_autocast_dtype(x)
        return add_low_rank(F.linear(x, self.weight, self.bias), x, update.A, update.B[rows])


class LoRAFusedLinear(FusedLinear):
    """The layers of all heads as one product, and their low-rank paths as two."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of the layers: (…, D) → (…, sum of their widths)."""
        layers = cast(list[LoRALinear], self.get_layers())
        concatenated = concatenate_linear(layers, LoRALinear)
        if concatenated is None:
            return super().forward(x)
        x = to_autocast_dtype(x)
        y = F.linear(x, *concatenated)
        # All heads are here in order, so that their rows of an update are all of its rows.
        updates = list(dict.fromkeys(update for update, _ in (layer.path for layer in layers)))
        A = torch.cat([update.A for update in updates])
        B = torch.block_diag(*[update.B for update in updates])
        return add_low_rank(y, x, A, B, len(updates[0].A))


class FloatEmbedding(nn.Embedding):
    """An embedding whose vectors are float32, also where its weight is bfloat16."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens: (…) → (…, D)."""
        return super().forward(tokens).float()


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Convert the input of two products once, where autocast would convert it for each."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def lora_scale(rank: int) -> float:
    """Return the factor of an update of a rank: Schulman et al. 2025."""
    return LORA_ALPHA / rank


def add_low_rank(y: Tensor, x: Tensor, A: Tensor, B: Tensor, rank: int | None = None) -> Tensor:
    """Return y + scale · B A x, for x (…, inputs), A (r, inputs), B (outputs, r).

    The rank that determines the scale is r, unless A and B are those of several updates.
    """
    hidden = F.linear(x, A)
    scale = lora_scale(rank or len(A))
    sum_ = torch.addmm(y.flatten(0, -2), hidden.flatten(0, -2), B.T, alpha=scale)
    return sum_.view_as(y)


def add_lora(
    model: Any,
    rank: int,
    matrix_dtype: torch.dtype = torch.float32,
    token_dtype: torch.dtype = torch.float32,
    train_tokens: bool = False,
) -> None:
    """Freeze a model, and add a low-rank update to each linear layer of its blocks.

    Frozen matrices of the blocks get matrix_dtype, and embeddings and head token_dtype. With
    train_tokens, token embeddings and head are trained too, in float32.
    """
    dtypes = {"matrix": matrix_dtype, "vector": torch.float32}
    for name, parameter in model.named_parameters():
        if not (train_tokens and name in TOKEN_PARAMETERS):
            parameter.requires_grad_(False)
            dtype = dtypes.get(model.specs[name].group, token_dtype)
            parameter.data = parameter.data.to(dtype)
    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.Embedding) and layer.weight.dtype != torch.float32:
            setattr(model, name, FloatEmbedding.from_pretrained(layer.weight))
    for block in model.blocks.children():
        add_updates(block, rank)
    for name, parameter in model.named_parameters():
        if name.endswith(A_NAME):  # the variance of PEFT's initial values; those of B are 0
            model.specs[name] = ParameterSpec("adapter", (3 * parameter.shape[1]) ** -0.5)
        elif name.endswith(B_NAME):
            model.specs[name] = ParameterSpec("adapter")


def add_updates(block: nn.Module, rank: int) -> None:
    """Add an update to each linear layer of a block; the queries of all heads count as one layer.

    So do their keys and their values.
    """
    groups: dict[str, dict[str, nn.Linear]] = {}
    for name, layer in block.named_modules():
        if is_plain_linear(layer):
            groups.setdefault(HEAD_PATTERN.sub("", name), {})[name] = layer
    for group_name, layers in groups.items():
        width, num_inputs = next(iter(layers.values())).weight.shape
        update = LowRankUpdate(num_inputs, width * len(layers), rank)
        for index, (name, layer) in enumerate(layers.items()):
            rows = slice(index * width, (index + 1) * width)
            block.set_submodule(name, LoRALinear(layer, update, rows))
        if group_name not in layers:
            block.set_submodule(group_name, nn.Module())
        block.get_submodule(group_name).add_module("lora", update)
    for name, module in list(block.named_modules()):
        if isinstance(module, FusedLinear):
            block.set_submodule(name, LoRAFusedLinear(module.get_layers))


def merge_updates(params: Mapping[str, Tensor], group_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters without the updates, which are added to the weights in float32.

    ``group_size`` is the number of heads that share a key and a value.
    """
    for name, value in params.items():
        head = HEAD_PATTERN.search(name)
        layer = HEAD_PATTERN.sub("", name).removesuffix("weight")
        A = params.get(layer + A_NAME)
        if A is not None:
            B = params[layer + B_NAME]
            if head:
                index = int(head[1]) // (1 if layer.endswith("query.") else group_size)
                B = B[index * len(value) : (index + 1) * len(value)]
            # In float32: the weight (outputs, inputs) of a merged layer.
            value = torch.addmm(value.float(), B.float(), A.float(), alpha=lora_scale(len(A)))
        if not name.endswith((A_NAME, B_NAME)):
            yield name, value
