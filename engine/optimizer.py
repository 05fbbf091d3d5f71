"""Which optimizer moves which parameter, how far at each step, and the state they keep."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.parallel import quick_dtype

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steep at zero, so five rounds are enough
NEWTON_SCHULZ_ROUNDS = 5


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are moved."""

    optimizer: Literal["muon", "adamw"] = "muon"  # For the matrices inside the blocks; the rest is AdamW's.
    learning_rate: float = 0.01  # The largest; see decay.
    weight_decay: float = 0.1  # Pull of matrices towards zero, in units of the learning rate.
    beta1: float = 0.9  # AdamW's memory of the gradient.
    beta2: float = 0.95  # AdamW's memory of its square.
    momentum: float = 0.9  # Muon's memory of the gradient.
    clip_norm: float = 1.0  # The largest norm of the gradient, all parameters together; 0: any.
    warmup_steps: int = 10  # Steps in which the learning rate rises from zero.
    decay: Literal["linear", "cosine", "inverse_sqrt"] = "linear"  # How it falls from there on.
    final_learning_rate: float = 0.0  # What it falls to by the last step, as a share of the largest.


def learning_rate_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """The share of the largest learning rate that optimizer step ``step`` (from 0) of ``steps`` uses."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.decay == "inverse_sqrt":  # Vaswani et al. 2017, eq. 3
        return math.sqrt(max(1, config.warmup_steps) / (step + 1))
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_learning_rate + (1 - config.final_learning_rate) * left


def parameter_group(name: str, parameter: Tensor) -> str:
    """Which of matrix (of a block), embedding (or output head) and vector a parameter is; ValueError for none."""
    if parameter.ndim == 1:
        return "vector"
    if parameter.ndim == 2 and ("embedding" in name or name.startswith("head.")):
        return "embedding"
    if parameter.ndim == 2 and name.startswith("blocks."):
        return "matrix"
    raise ValueError(f"no optimizer group fits the parameter {name}; add a rule to parameter_group()")


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each (…, rows, columns), roughly: singular values become about 1.

    Newton–Schulz iteration as in Muon (Jordan et al. 2024).
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024): every matrix moves equally far in all directions that matter.

    Each parameter group holds matrices of one shape, stacked and orthogonalised in one batched call. Updates are
    scaled to the size of AdamW's (Liu et al. 2025, eq. 4), so that one learning rate serves both.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float, weight_decay: float):
        shapes: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": same} for same in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for matrix in group["params"]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self, closure=None):
        """One update from the gradients that are there; every matrix must have one."""
        for group in self.param_groups:
            matrices, momentum = group["params"], group["momentum"]
            gradients = [matrix.grad for matrix in matrices]
            memory = [self.state[matrix]["momentum"] for matrix in matrices]
            torch._foreach_lerp_(memory, gradients, 1 - momentum)
            ahead = torch._foreach_lerp(gradients, memory, momentum)  # Nesterov: a look one step ahead
            quick = torch.stack(ahead).to(quick_dtype(matrices[0].device))
            updates = orthogonalise(quick).to(matrices[0].dtype).unbind(0)
            scale = 0.2 * math.sqrt(max(matrices[0].shape))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, updates, alpha=-group["lr"] * scale)


class Optimizer:
    """All optimizers of a model as one: every parameter belongs to exactly one of them."""

    def __init__(self, model: nn.Module, config: OptimizerConfig):
        """Raises ValueError for a parameter that no group fits."""
        self.config = config
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        groups: dict[str, list[Tensor]] = {"matrix": [], "embedding": [], "vector": []}
        for parameter, name in self.names.items():
            groups[parameter_group(name, parameter)].append(parameter)
        adamw = [
            {"params": groups["embedding"], "weight_decay": config.weight_decay},
            {"params": groups["vector"], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = []
        if config.optimizer == "muon":
            self.optimizers.append(Muon(groups["matrix"], config.learning_rate, config.momentum, config.weight_decay))
        else:
            adamw.append({"params": groups["matrix"], "weight_decay": config.weight_decay})
        adamw = [group for group in adamw if group["params"]]
        betas = (config.beta1, config.beta2)
        self.optimizers.append(torch.optim.AdamW(adamw, lr=config.learning_rate, betas=betas, fused=True))

    def step(self, step: int, steps: int) -> tuple[float, Tensor]:
        """Clip the gradients, update every parameter and forget the gradients.

        Returns the learning rate of optimizer step ``step`` (from 0) of ``steps``, and the norm before clipping.
        """
        rate = self.config.learning_rate * learning_rate_factor(step, steps, self.config)
        norm = nn.utils.clip_grad_norm_(self.names, self.config.clip_norm or math.inf)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return rate, norm

    def state(self) -> dict[str, Tensor]:
        """Everything the optimizers remember, as ``{parameter name}.{what}`` tensors."""
        return {
            f"{self.names[parameter]}.{what}": value
            for optimizer in self.optimizers
            for parameter, memory in optimizer.state.items()
            for what, value in memory.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Remember what :meth:`state` returned. Raises ValueError if it belongs to other parameters."""
        by_name = {name: parameter for parameter, name in self.names.items()}
        optimizer_of = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for key, value in state.items():
            name, what = key.rsplit(".", 1)
            if name not in by_name:
                raise ValueError(f"the optimizer state has {key}, but the model has no parameter {name}")
            parameter = by_name[name]
            device = "cpu" if what == "step" and parameter.device.type == "cpu" else parameter.device
            optimizer_of[parameter].state[parameter][what] = value.to(device)
