"""Which optimizer moves which parameter, how far at each step, and the state they keep."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.parallel import ALONE, World, part_of, quick_dtype, spread_like, take_part, whole_rows

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steep at zero, so five rounds are enough
NEWTON_SCHULZ_ROUNDS = 5
GUARD = ("loss_scale", "good_steps", "skipped", "skipped_in_a_row")
FIRST_LOSS_SCALE = 2.0**16  # for float16, whose smallest numbers would else be lost; then it adapts
STEPS_TO_GROW = 2000  # good steps after which a loss scale doubles, as in torch.amp.GradScaler


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

    Each parameter group holds matrices of one shape, stacked and orthogonalised in one batched call, shared out among
    the processes. Updates are scaled to the size of AdamW's (Liu et al. 2025, eq. 4), so that one learning rate serves
    both. As in PyTorch's fused optimizers, a ``found_inf`` that is not 0 makes a step change nothing.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        world: World = ALONE,
        dtype: torch.dtype = torch.float32,
    ):
        """dtype is what to orthogonalise in. Matrices may be this process's rows of larger ones."""
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            shapes.setdefault((whole_rows(matrix), *matrix.shape[1:]), []).append(matrix)
        groups = [{"params": same, "shape": shape} for shape, same in shapes.items()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.world, self.dtype = world, dtype
        self.found_inf = torch.zeros((), device=self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            for matrix in group["params"]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self, closure=None):
        """One update from the gradients that are there; every matrix must have one."""
        for group in self.param_groups:
            matrices, momentum = group["params"], group["momentum"]
            memory = [self.state[matrix]["momentum"] for matrix in matrices]
            before, gradients = torch.stack(memory), torch.stack([matrix.grad for matrix in matrices])
            gradients = torch.where(self.found_inf == 0, gradients, before)  # where nothing pulls, nothing changes
            after = before.lerp(gradients, 1 - momentum)
            torch._foreach_copy_(memory, after.unbind())
            ahead = gradients.lerp(after, momentum).to(self.dtype)  # Nesterov: a look one step ahead
            updates = self.world.share_out(orthogonalise, ahead, group["shape"][0]).to(after.dtype)
            rate = group["lr"] * (1 - self.found_inf)
            torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
            torch._foreach_add_(matrices, (updates * (-rate * 0.2 * math.sqrt(max(group["shape"])))).unbind())


class Optimizer:
    """All optimizers of a model as one: every parameter belongs to exactly one of them.

    They work on this process's part of each parameter. A step whose gradient is not finite changes nothing, on any
    process; the device decides, and nobody waits for it.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, world: World = ALONE, dtype: torch.dtype = torch.float32
    ):
        """dtype is what the model computes in: float32 is kept to throughout, and float16 needs its loss scaled.

        Raises ValueError if no group fits a parameter.
        """
        self.config, self.world = config, world
        self.parameters = dict(model.named_parameters())
        self.parts = {name: part_of(parameter) for name, parameter in self.parameters.items()}
        groups: dict[str, list[Tensor]] = {"matrix": [], "embedding": [], "vector": []}
        for name, part in self.parts.items():
            groups[parameter_group(name, part)].append(part)
        adamw = [
            {"params": groups["embedding"], "weight_decay": config.weight_decay},
            {"params": groups["vector"], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = []
        if config.optimizer == "muon":
            quick = dtype if dtype == torch.float32 else quick_dtype(world.device)
            settings = (config.learning_rate, config.momentum, config.weight_decay)
            self.optimizers.append(Muon(groups["matrix"], *settings, world, quick))
        else:
            adamw.append({"params": groups["matrix"], "weight_decay": config.weight_decay})
        adamw = [group for group in adamw if group["params"]]
        betas = (config.beta1, config.beta2)
        self.optimizers.append(torch.optim.AdamW(adamw, lr=config.learning_rate, betas=betas, fused=True))
        self.scaling = dtype == torch.float16
        self.guard = {name: torch.zeros((), device=world.device) for name in GUARD}
        self.guard["loss_scale"] += FIRST_LOSS_SCALE if self.scaling else 1

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to go back from: scaled, and if it is not finite, with no finite gradient on any process."""
        return loss * (self.guard["loss_scale"] + 0 * loss.detach())

    def step(self, step: int, steps: int) -> tuple[float, Tensor]:
        """Clip the gradients, update every parameter and forget the gradients.

        Returns the learning rate of optimizer step ``step`` (from 0) of ``steps``, and the norm before clipping.
        """
        for name, parameter in self.parameters.items():
            take_part(self.parts[name], parameter)
        rate = self.config.learning_rate * learning_rate_factor(step, steps, self.config)
        gradients = [part.grad for part in self.parts.values() if part.grad is not None]
        norm = self.world.norm(gradients) / self.guard["loss_scale"]
        if self.config.clip_norm or self.scaling:
            clip = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1) if self.config.clip_norm else 1
            torch._foreach_mul_(gradients, clip / self.guard["loss_scale"])
        found_inf = (~norm.isfinite()).float()
        for optimizer in self.optimizers:
            optimizer.found_inf = found_inf
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self._count(found_inf)
        for parameter in self.parameters.values():
            parameter.grad = None
        return rate, norm

    def _count(self, found_inf: Tensor) -> None:
        """Count what was skipped; halve the loss scale after that, double it after many good steps."""
        guard = self.guard
        guard["skipped"] += found_inf
        guard["skipped_in_a_row"].add_(1).mul_(found_inf)
        if self.scaling:
            guard["good_steps"].add_(1).mul_(1 - found_inf)
            grown = (guard["good_steps"] >= STEPS_TO_GROW).float()
            guard["loss_scale"].mul_(2 ** (grown - found_inf))
            guard["good_steps"].mul_(1 - grown)

    def state(self) -> dict[str, Tensor]:
        """Everything the optimizers remember, as ``{parameter name}.{what}`` and ``guard.{what}`` tensors."""
        optimizer_of = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        state = {f"guard.{what}": value for what, value in self.guard.items()}
        for name, part in self.parts.items():
            for what, value in optimizer_of[part].state[part].items():
                state[f"{name}.{what}"] = spread_like(value, self.parameters[name])
        return state

    def load_state(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Remember what :meth:`state` returned. Raises ValueError if it belongs to other parameters."""
        optimizer_of = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for key, value in state:
            name, what = key.rsplit(".", 1)
            if name == "guard":
                self.guard[what].copy_(value)
                continue
            if name not in self.parts:
                raise ValueError(f"the optimizer state has {key}, but the model has no parameter {name}")
            part = self.parts[name]
            mine = self.world.part(value, self.parameters[name]) if value.ndim else value
            device = "cpu" if what == "step" and part.device.type == "cpu" else part.device
            optimizer_of[part].state[part][what] = mine.to(device)
