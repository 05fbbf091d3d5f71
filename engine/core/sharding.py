"""Tensors and models of several ranks: sharded by FSDP, or replicated by DDP."""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.core.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # imported where used: it takes half a second

    from engine.core.distributed import DistributedContext

Model = TypeVar("Model", bound=nn.Module)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether this is a DTensor, of which each rank holds some rows."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank holds: all, unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """Return a copy of a full tensor with the device and sharding of a parameter."""
    if not is_sharded(param):
        return full.to(param.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the full tensor: None sends no messages.
    shard = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    return shard.clone()  # a slice would keep the full tensor in memory


@torch.no_grad()
def load_parameters(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Set every parameter, one at a time. Raises UserError for other names or shapes.

    A frozen one on a CPU becomes the given tensor, which may be mapped from a file, without a copy.
    """
    params = dict(model.named_parameters())
    for name, full in tensors:
        if name not in params or params[name].shape != full.shape:
            shape = tuple(full.shape)
            raise UserError(f"checkpoint: {name} {shape} is not a parameter of the model.")
        param = params.pop(name)
        is_same_kind = (full.dtype, full.device) == (param.dtype, param.device)
        if is_same_kind and not param.requires_grad and not is_sharded(param):
            param.data = full
        else:
            local(param).copy_(local(shard_like(full, param)))
    if params:
        raise UserError(f"checkpoint: parameter {next(iter(params))} is missing.")


def shard_and_allocate(model: Model, dist_ctx: "DistributedContext", dtype: torch.dtype) -> Model:
    """Move a model from the meta device to the rank's device, without values; return it.

    Sharded (FSDP2: Zhao et al. 2023), ranks gather parameters where they are used, those of
    ``blocks`` in dtype. Activations keep their own dtype, as without sharding.
    """
    if dist_ctx.sharded:
        from torch.distributed.device_mesh import init_device_mesh  # imported late: half a second
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(dist_ctx.device.type, (dist_ctx.size,))
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
    return model.to_empty(device=dist_ctx.device)


def wrap_ddp(model: nn.Module, dist_ctx: "DistributedContext", *example: Tensor) -> nn.Module:
    """Return the model with gradients averaged over ranks in the backward pass.

    DDP rearranges its buckets after the first backward pass. An example micro-batch comes first, so
    that a resumed run sums in the same order as an uninterrupted one.
    """
    if dist_ctx.sharded or dist_ctx.size == 1:
        return model
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model(*example).backward()
    ddp_model.zero_grad()
    return ddp_model


def gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return a context for a backward pass that averages gradients over ranks, or does not yet."""
    set_fsdp_sync = getattr(model, "set_requires_gradient_sync", None)
    if set_fsdp_sync is not None:
        set_fsdp_sync(enabled)
    if isinstance(model, DistributedDataParallel) and not enabled:
        return model.no_sync()
    return contextlib.nullcontext()
