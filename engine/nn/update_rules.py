"""Muon and AdamW, with the interface of torch.optim.Optimizer.

They do not derive from it, because that would import PyTorch's compiler: a second at every start.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.sharding import local

ParamGroup = dict[str, Any]  # as in torch.optim: "params" and settings such as "lr"

# Coefficients (a, b, c) of Polar Express (Amsel et al. 2025). Singular values from 0.004 to 1 end
# at 0.83 to 1.17. All iterations but the last tolerate values up to 1.02.
NEWTON_SCHULZ_COEFFICIENTS = (
    (8.1775, -23.1787, 16.5051),
    (3.9000, -2.7944, 0.5111),
    (3.2623, -2.3513, 0.4626),
    (2.3086, -1.6760, 0.4196),
)
MAX_GRAM_ITERATIONS = 2  # each multiplies the Gram matrix's rounding errors by up to a²
ROW_MOMENTUM = 0.95  # of the running mean squares of the rows of an update
MIN_ROW_SQUARE = 1e-4  # lower bound of a mean square, relative to that of an orthogonal matrix


class GroupedOptimizer:
    """The interface of torch.optim.Optimizer: parameters in groups, and their state."""

    def __init__(self, params: Iterable[Tensor] | Iterable[ParamGroup], **defaults: object):
        """Take tensors, or groups of tensors whose settings replace the defaults."""
        groups: list[Any] = list(params)
        if groups and isinstance(groups[0], Tensor):
            groups = [{"params": groups}]
        self.param_groups: list[ParamGroup] = [defaults | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.initial_state(parameter, group)

    def initial_state(self, parameter: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        """Return the state of a parameter before the first step."""
        raise NotImplementedError

    def update_group(self, group: ParamGroup) -> None:
        """Update the parameters of a group. May overwrite their gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter. May overwrite the gradients."""
        for group in self.param_groups:
            self.update_group(group)

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for parameter in self.state:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, with an index in place of each parameter."""
        indices = {parameter: index for index, parameter in enumerate(self.state)}
        groups = []
        for group in self.param_groups:
            groups.append(group | {"params": [indices[parameter] for parameter in group["params"]]})
        state = {indices[parameter]: values for parameter, values in self.state.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, onto the devices of the parameters."""
        parameters = list(self.state)
        for index, values in state_dict["state"].items():
            parameter = parameters[index]
            for key, value in values.items():
                self.state[parameter][key] = value.to(parameter.device)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


class Muon(GroupedOptimizer):
    """Momentum with orthogonalized updates: Jordan et al. 2024.

    All matrices of a group have one shape, and are orthogonalized in one batch that is distributed
    over the ranks. The group's setting ``stack_size`` stacks that many consecutive matrices into
    one. Updates are scaled to the size of AdamW's (Liu et al. 2025, eq. 4). The rows of a tall
    matrix are scaled to equal length by their recent mean squares (NorMuon: Li et al. 2025).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: float = 0.014,
        momentum: float = 0.9,
        weight_decay: float = 0.1,
        dist_ctx: DistributedContext = SINGLE_PROCESS,
        dtype: torch.dtype = torch.float32,
    ):
        """Orthogonalize in ``dtype``. Raises ValueError for a group with several shapes."""
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, stack_size=1)
        self.dist_ctx = dist_ctx
        self.dtype = dtype
        for group in self.param_groups:
            shapes = {tuple(parameter.shape) for parameter in group["params"]}
            if len(shapes) != 1:
                raise ValueError(f"matrices of a group must have one shape (got {shapes})")

    def initial_state(self, parameter: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        """Return the mean of the gradients and, for a tall matrix, the mean squares of its rows."""
        state = {"momentum": torch.zeros_like(parameter)}
        height = group["stack_size"] * parameter.shape[0]
        if height > parameter.shape[1]:  # orthogonal rows have the mean square 1 / height
            state["row_squares"] = torch.full_like(parameter[:, :1].detach(), 1 / height)
        return state

    def update_group(self, group: ParamGroup) -> None:
        """Update the matrices of a group that have a gradient, and overwrite their gradients.

        In a stack with other gradients, a missing one counts as zero.
        """
        stack_size = group["stack_size"]
        params: list[Tensor] = []
        for start in range(0, len(group["params"]), stack_size):
            stack = group["params"][start : start + stack_size]
            if any(param.grad is not None for param in stack):
                params += stack
        if not params:
            return
        num_rows, num_columns = params[0].shape
        matrices = [local(param) for param in params]
        has_grad = [param.grad is not None for param in params]
        grads = [
            torch.zeros_like(matrix) if param.grad is None else local(param.grad)
            for param, matrix in zip(params, matrices, strict=True)
        ]
        momenta = [local(self.state[param]["momentum"]) for param in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov: one step ahead

        batch = torch.empty(len(grads), *grads[0].shape, dtype=self.dtype, device=grads[0].device)
        torch._foreach_copy_(list(batch.unbind()), grads)
        work = functools.partial(orthogonalize, stack_size=stack_size)
        updates = self.dist_ctx.map_matrices_across_ranks(work, batch, num_rows, stack_size)
        updates = updates.to(matrices[0].dtype)
        height = stack_size * num_rows
        if height > num_columns:
            row_squares = [local(self.state[param]["row_squares"]) for param in params]
            updates.mul_(compute_row_scale(row_squares, updates, height))

        # The weight decay is added to the updates before the learning rate is applied.
        scale = 0.2 * math.sqrt(max(height, num_columns))
        update_list = list(itertools.compress(updates.unbind(), has_grad))
        matrices = list(itertools.compress(matrices, has_grad))
        torch._foreach_add_(update_list, matrices, alpha=group["weight_decay"] / scale)
        step_size = -group["lr"] * scale
        if isinstance(step_size, Tensor):  # in a CUDA graph
            torch._foreach_mul_(update_list, step_size)
            torch._foreach_add_(matrices, update_list)
        else:
            torch._foreach_add_(matrices, update_list, alpha=step_size)


def compute_row_scale(row_squares: list[Tensor], updates: Tensor, height: int) -> Tensor:
    """Return factors (n, rows, 1) that scale the rows of updates to about equal length.

    updates is (n, rows, columns). row_squares holds a running mean square of each row, of each
    matrix (rows, 1), and is updated in place. height is the number of rows of a stacked matrix.
    """
    norms = torch.linalg.vector_norm(updates, dim=-1, keepdim=True)
    means = torch.stack(row_squares).lerp(norms.square() / updates.shape[-1], 1 - ROW_MOMENTUM)
    torch._foreach_copy_(row_squares, list(means.unbind()))
    return (height * means).clamp(min=MIN_ROW_SQUARE).rsqrt()


def orthogonalize(matrices: Tensor, stack_size: int = 1) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix to each of the matrices (n, rows, columns).

    ``stack_size`` consecutive matrices are stacked by rows into one matrix X. First, X is divided
    by √‖G‖, which is at least its largest singular value and at most ‖X‖ (Grishina et al. 2025).

    Each Newton–Schulz iteration replaces X by P X, with P = a I + b G + c G² and G = X Xᵀ; a tall X
    by X P, with G = Xᵀ X. If X is far from square, every second iteration computes its G as P G P
    from the previous one. X is then multiplied once by the product of both P (Zhang et al. 2026).
    """
    num_columns = matrices.shape[-1]
    x = matrices.reshape(-1, stack_size * matrices.shape[-2], num_columns)
    num_rows = x.shape[-2]
    is_tall = num_rows > num_columns
    is_elongated = max(num_rows, num_columns) > 1.5 * min(num_rows, num_columns)
    num_iterations = MAX_GRAM_ITERATIONS if is_elongated else 1  # of the same Gram matrix
    for start in range(0, len(NEWTON_SCHULZ_COEFFICIENTS), num_iterations):
        gram = x.mT @ x if is_tall else x @ x.mT
        if start == 0:
            gram_norm = gram.norm(dim=(-2, -1), keepdim=True) + 1e-14
            gram = gram / gram_norm
            x = x / gram_norm.sqrt()
        p = evaluate_polynomial(gram, *NEWTON_SCHULZ_COEFFICIENTS[start])
        product = p
        for coefficients in NEWTON_SCHULZ_COEFFICIENTS[start + 1 : start + num_iterations]:
            gram = p @ gram @ p
            p = evaluate_polynomial(gram, *coefficients)
            product = p @ product
        x = x @ product if is_tall else product @ x
    return x.view_as(matrices)


def evaluate_polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a I + b G + c G² for symmetric matrices G (n, rows, rows)."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


class AdamW(GroupedOptimizer):
    """Adam with decoupled weight decay: Loshchilov & Hutter 2019.

    PyTorch's fused kernel reads and writes each tensor once, foreach operations many times.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def initial_state(self, parameter: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        """Return the number of steps, and the running means of the gradient and its square."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def update_group(self, group: ParamGroup) -> None:
        """Update the parameters of a group that have a gradient."""
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            [local(param) for param in params],
            [local(param.grad) for param in params],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
