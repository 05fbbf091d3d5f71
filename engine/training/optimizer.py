"""Which optimizer moves which parameter, how far at each step, and the state they keep."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from engine.core.device import fast_dtype
from engine.core.distributed import SINGLE_PROCESS, DistributedContext, Sliceable, held_like, local
from engine.core.errors import UserError

# a, b, c of each round, each the best that follow those before, for singular values from 0.004 on: they end within 0.17
# of 1 (Polar Express: Amsel et al. 2025, algorithm 1). All but the last bear values up to 1.02 times as large as they
# should be, or a rounding error above the largest would grow without bounds (section 4.4).
NEWTON_SCHULZ = (
    (8.1775, -23.1787, 16.5051),
    (3.9000, -2.7944, 0.5111),
    (3.2623, -2.3513, 0.4626),
    (2.3086, -1.6760, 0.4196),
)
ROUNDS_ON_GRAM = 2  # in a row; each makes rounding errors up to a² larger, and bfloat16 does not bear a third
ROW_MEMORY, SMALLEST_SQUARE = 0.95, 1e-4  # of the squares of an update's rows, and the least, where 1 is usual
WARMUP_STEPS = 10  # unless the settings say otherwise
EMBEDDING_RATES = {"muon": 3.0, "adamw": 1.0}  # likewise
GUARD = ("loss_scale", "good_steps", "skipped", "skipped_in_a_row")
FIRST_LOSS_SCALE = 2.0**16  # for float16, whose smallest numbers would underflow; then it adapts
MOST_SKIPPED = 50  # steps in a row without a finite gradient, after which a run ends
STEPS_TO_GROW = 2000  # good steps after which a loss scale doubles, as in torch.amp.GradScaler


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are moved."""

    optimizer: Literal["muon", "adamw"] = "muon"  # For the matrices inside the blocks; the rest is AdamW's.
    learning_rate: Annotated[float, "at least 0"] = 0.014  # The largest; see decay.
    # The token embedding's rate, as a multiple, where the output head is another matrix; None: 3 beside Muon, else 1.
    embedding_rate: Annotated[float | None, "above 0"] = None
    weight_decay: Annotated[float, "at least 0"] = 0.1  # Pull of matrices towards zero, in units of the learning rate.
    beta1: Annotated[float, "at least 0, below 1"] = 0.9  # AdamW's memory of the gradient.
    beta2: Annotated[float, "at least 0, below 1"] = 0.95  # AdamW's memory of its square.
    momentum: Annotated[float, "at least 0, below 1"] = 0.9  # Muon's memory of the gradient.
    clip_norm: Annotated[float, "at least 0"] = 1.0  # The largest norm of the gradient, all together; 0: any.
    # Steps in which the learning rate rises from zero; None: 10, in a shorter run all but the last.
    warmup_steps: Annotated[int | None, "at least 0"] = None
    # Part of the run in which the first block sees 16 tokens at most; None: 0.2, of characters or --init-from 0.
    window_warmup: Annotated[float | None, "at least 0, at most 1"] = None
    decay: Literal["linear", "cosine", "inverse_sqrt"] = "linear"  # How it falls from there on.
    # What it falls to by the last step, as a fraction of the largest.
    final_learning_rate: Annotated[float, "at least 0"] = 0.0


def learning_rate_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """The fraction of the largest learning rate that optimizer step ``step`` (from 0) of ``steps`` uses."""
    warmup = min(WARMUP_STEPS, steps - 1) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if config.decay == "inverse_sqrt":  # Vaswani et al. 2017, eq. 3
        return math.sqrt(max(1, warmup) / (step + 1))
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_learning_rate + (1 - config.final_learning_rate) * left


def orthogonalise(matrices: Tensor, joined: int = 1) -> Tensor:
    """About the nearest semi-orthogonal matrix of each (n, rows, columns), by Newton–Schulz (Jordan et al. 2024).

    A round takes X to P X, where P = a I + b G + c G² and G = X Xᵀ, and so takes G to P G P. If X is wide, a few rounds
    are done on the small G alone, and then X is multiplied by all their P at once (Zhang et al. 2026). If X is tall,
    its transpose is meant. Before, X is divided by √‖G‖: no singular value is above that, and ‖X‖ is up to twice as
    large (Grishina et al. 2025). Each ``joined`` matrices in a row are taken for one, of all their rows.
    """
    x = matrices.reshape(-1, joined * matrices.shape[-2], matrices.shape[-1])
    tall, wide = x.shape[-2] > x.shape[-1], max(x.shape[-2:]) > 1.5 * min(x.shape[-2:])
    at_once = ROUNDS_ON_GRAM if wide else 1  # of fewer operations only then
    for first in range(0, len(NEWTON_SCHULZ), at_once):
        gram, p, product = x.mT @ x if tall else x @ x.mT, None, None
        if first == 0:
            square = gram.norm(dim=(-2, -1), keepdim=True) + 1e-14
            gram, x = gram / square, x / square.sqrt()
        for a, b, c in NEWTON_SCHULZ[first : first + at_once]:
            gram = gram if p is None else p @ gram @ p
            p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            product = p if product is None else p @ product
        x = x @ product if tall else product @ x
    return x.view_as(matrices)


class Group(NamedTuple):
    """Parameters that are moved alike, and by which multiple of the learning rate."""

    parameters: list[Tensor]
    weight_decay: float
    rate: float = 1.0
    joined: int = 1  # how many in a row Muon takes for one matrix, of all their rows


class Muon:
    """Momentum, orthogonalised (Jordan et al. 2024): every matrix moves equally far in all directions that matter.

    Matrices of one shape are stacked and orthogonalised in one batched call, distributed over the processes. Updates
    are scaled to the size of AdamW's (Liu et al. 2025, eq. 4), so that one learning rate serves both; and the rows of a
    tall matrix, by their mean squares of late, to one length, which a wide one's have (NorMuon: Li et al. 2025).
    """

    # Neither this nor AdamW is a torch.optim.Optimizer, which imports the compiler: a second of every start.

    def __init__(
        self,
        groups: Sequence[Group],
        world: DistributedContext = SINGLE_PROCESS,
        dtype: torch.dtype = torch.float32,
        momentum: float = 0.9,
    ):
        """The matrices of a group have one shape. dtype is what to orthogonalise in."""
        self.groups, self.world, self.dtype, self.momentum = groups, world, dtype, momentum
        self.state = {}
        for group in groups:
            for matrix in group.parameters:
                self.state[matrix] = {"momentum": torch.zeros_like(matrix)}
                if (rows := group.joined * matrix.shape[0]) > matrix.shape[1]:
                    self.state[matrix]["row_squares"] = torch.full_like(matrix[:, :1].detach(), 1 / rows)

    @torch.no_grad()
    def step(self, learning_rate: float, found_inf: Tensor) -> None:
        """One update from the gradients, which are used up; with a found_inf that is not 0, none."""
        for group in self.groups:
            matrices, (rows, columns) = [local(matrix) for matrix in group.parameters], group.parameters[0].shape
            memory = [local(self.state[matrix]["momentum"]) for matrix in group.parameters]
            gradients = [local(matrix.grad).contiguous() for matrix in group.parameters]  # sgd asks for no strides
            _descend(memory, gradients, self.momentum - 1, -1, found_inf)  # towards the gradient: a running mean
            torch._foreach_lerp_(gradients, memory, self.momentum)  # Nesterov: a look one step ahead
            stack = torch.empty(len(matrices), *matrices[0].shape, dtype=self.dtype, device=matrices[0].device)
            torch._foreach_copy_(stack.unbind(), gradients)
            work = functools.partial(orthogonalise, joined=group.joined)
            updates = self.world.distribute(work, stack, rows, group.joined).to(matrices[0].dtype)
            if (rows := group.joined * rows) > columns:  # cast already: the norms and the product would each cast anew
                squares = [local(self.state[matrix]["row_squares"]) for matrix in group.parameters]
                updates.mul_(_row_scale(squares, updates, rows, found_inf))
            size = 0.2 * math.sqrt(max(rows, columns))
            _descend(matrices, updates.unbind(), learning_rate * size, group.weight_decay / size, found_inf)


def _row_scale(memory: Sequence[Tensor], updates: Tensor, rows: int, found_inf: Tensor) -> Tensor:
    """What makes rows of updates (n, rows, columns) as long as each other, (n, rows, 1): their squares are kept."""
    before = torch.stack(memory)
    norms = torch.linalg.vector_norm(updates, dim=-1, keepdim=True)
    after = before.lerp(norms.square() / updates.shape[-1], 1 - ROW_MEMORY)
    after = torch.where(found_inf == 0, after, before)
    torch._foreach_copy_(memory, after.unbind())
    return (rows * after).clamp(min=SMALLEST_SQUARE).rsqrt()


def _descend(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor], rate: float, weight_decay: float, found_inf: Tensor
) -> None:
    """Take rate * (gradient + weight_decay * tensor) off, in one pass over the memory; nothing if found_inf."""
    plain = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
    sgd(tensors, gradients, [], lr=rate, weight_decay=weight_decay, fused=True, found_inf=found_inf, **plain)


class AdamW:
    """Adam whose weight decay is its own (Loshchilov and Hutter 2019), by PyTorch's fused kernel."""

    def __init__(self, groups: Sequence[Group], beta1: float, beta2: float):
        self.groups, self.betas = groups, {"beta1": beta1, "beta2": beta2}
        self.state = {
            parameter: {"step": torch.zeros((), device=parameter.device)}
            | {what: torch.zeros_like(parameter) for what in ("exp_avg", "exp_avg_sq")}
            for group in groups
            for parameter in group.parameters
        }

    @torch.no_grad()
    def step(self, learning_rate: float, found_inf: Tensor) -> None:
        """One update of what has a gradient; with a found_inf that is not 0, none."""
        for group in self.groups:
            moved = [parameter for parameter in group.parameters if parameter.grad is not None]
            held = [[local(parameter) for parameter in moved], [local(parameter.grad) for parameter in moved]]
            held += [[local(self.state[parameter][what]) for parameter in moved] for what in ("exp_avg", "exp_avg_sq")]
            steps, settings = [self.state[parameter]["step"] for parameter in moved], {"eps": 1e-8} | self.betas
            settings |= {"lr": learning_rate * group.rate, "weight_decay": group.weight_decay, "fused": True}
            adamw(*held, [], steps, found_inf=found_inf, amsgrad=False, maximize=False, **settings)


class Optimizer:
    """All optimizers of a model as one: every parameter belongs to exactly one of them, by the model's ``rules``.

    A step whose gradient is not finite changes nothing, on any process; the device decides, and nobody waits for it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        world: DistributedContext = SINGLE_PROCESS,
        dtype: torch.dtype = torch.float32,
    ):
        """dtype is what the model computes in: float32 is kept to throughout, and float16 needs its loss scaled."""
        self.config, self.world = config, world
        self.parameters = dict(model.named_parameters())
        groups: dict[str, list[Tensor]] = {"embedding": [], "head": [], "vector": [], "matrix": []}
        matrices: dict[tuple[int, torch.Size], list[Tensor]] = {}  # Muon's
        for name, parameter in self.parameters.items():
            rule = model.rules[name]
            if rule.group == "matrix" and config.optimizer == "muon":
                matrices.setdefault((rule.joined, parameter.shape), []).append(parameter)
            else:
                groups[rule.group].append(parameter)
        self.optimizers: list[Muon | AdamW] = []
        if config.optimizer == "muon":
            fast = dtype if dtype == torch.float32 else fast_dtype(world.device)
            same = [Group(these, config.weight_decay, joined=joined) for (joined, _), these in matrices.items()]
            self.optimizers.append(Muon(same, world, fast, config.momentum))
        decay, rates = {"vector": 0.0}, {"embedding": config.embedding_rate or EMBEDDING_RATES[config.optimizer]}
        alike = [
            Group(parameters, decay.get(name, config.weight_decay), rates.get(name, 1.0))
            for name, parameters in groups.items()
            if parameters
        ]
        self.optimizers.append(AdamW(alike, config.beta1, config.beta2))
        self.scaling = dtype == torch.float16
        self.guard = {name: torch.zeros((), device=world.device) for name in GUARD}
        self.guard["loss_scale"] += FIRST_LOSS_SCALE if self.scaling else 1

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to start the backward pass from: scaled; if not finite, no gradient is finite on any process."""
        return loss * (self.guard["loss_scale"] + 0 * loss.detach())

    def step(self, step: int, steps: int) -> tuple[float, Tensor]:
        """Clip the gradients, update every parameter and forget the gradients.

        Returns the learning rate of optimizer step ``step`` (from 0) of ``steps``, and the norm before clipping.
        """
        rate = self.config.learning_rate * learning_rate_factor(step, steps, self.config)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = self.world.norm(gradients) / self.guard["loss_scale"]
        if self.config.clip_norm or self.scaling:
            clip = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1) if self.config.clip_norm else 1
            torch._foreach_mul_([local(gradient) for gradient in gradients], clip / self.guard["loss_scale"])
        found_inf = (~norm.isfinite()).float()
        for optimizer in self.optimizers:
            optimizer.step(rate, found_inf)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._count(found_inf)
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

    def count_skipped(self, saved: int) -> int:
        """How many steps were skipped. Raises UserError after too many in a row; saved is the step to resume from."""
        skipped, in_a_row = (int(self.guard[what].item()) for what in ("skipped", "skipped_in_a_row"))
        if in_a_row >= MOST_SKIPPED:
            raise UserError(
                f"the last {in_a_row} steps had no finite gradient, and changed nothing; lower --learning-rate, set "
                f"--clip-norm, or compute in another --dtype, and go on with --resume from step {saved:,}"
            )
        return skipped

    def _memory(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizers remember of each parameter, by its name."""
        held = {parameter: state for one in self.optimizers for parameter, state in one.state.items()}
        return {name: held[parameter] for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """Everything the optimizers remember, as ``{parameter name}.{what}`` and ``guard.{what}`` tensors."""
        memory = {"guard": self.guard} | self._memory()
        return {f"{name}.{what}": value for name, held in memory.items() for what, value in held.items()}

    def load_state(self, state: Iterable[tuple[str, Sliceable]]) -> None:
        """Remember what :meth:`state` returned. Raises UserError if it belongs to other parameters."""
        memory = {"guard": self.guard} | self._memory()
        for key, value in state:
            name, what = key.rsplit(".", 1)
            if name not in memory:
                raise UserError(f"the optimizer state has {key}, but the model has no parameter {name}")
            if name == "guard":
                self.guard[what].copy_(value[...])
            else:  # a count of steps is a scalar, whatever the parameter
                memory[name][what] = held_like(self.parameters[name], value)
        if self.scaling != bool(self.guard["loss_scale"] > 1):  # the run computed in another dtype
            self.guard["loss_scale"].fill_(FIRST_LOSS_SCALE if self.scaling else 1)
