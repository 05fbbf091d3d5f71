"""Which optimizer updates which parameter, the learning-rate schedule, and the saved state."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from engine.core.device import fast_dtype
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.errors import UserError
from engine.core.sharding import local, shard_like
from engine.core.values import AUTO, Auto
from engine.nn.acceleration import GRAPH_POOLS, CapturedCalls, GraphPool
from engine.nn.specs import Specs
from engine.nn.update_rules import AdamW, GroupedOptimizer, Muon, ParamGroup
from model import GPT

INITIAL_LOSS_SCALE = 2.0**16  # for float16, whose smallest numbers would underflow; then it adapts
NUM_STEPS_TO_DOUBLE_SCALE = 2000  # finite steps in a row, as in torch.amp.GradScaler
MAX_GRADIENT_NORM = 1e9  # after clipping: the squares of squares of more are not finite
UNUSABLE_GRADIENTS = f"not finite or above {MAX_GRADIENT_NORM:g}"
BETA2_BY_TOKENS = {2**14: 0.99, 2**19: 0.95}  # of a step; see default_beta2
FINE_TUNING_BETA2 = 0.95  # longer means do not help there (experiments, 2026-11-29)
MAX_SKIPPED_STEPS = 50  # in a row, until a run ends


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a run. None: the value is chosen by :func:`default_rates`."""

    # Muon updates the matrices inside the blocks, and AdamW the other parameters.
    optimizer: Literal["muon", "adamw"] = "muon"
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9  # AdamW's decay rate of the mean gradient.
    # AdamW's decay of the mean squared gradient. None: 0.99; 0.95: large batches, --init-from.
    beta2: Auto[Annotated[float, Ge(0), Lt(1)]] = AUTO
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9  # Muon's decay rate of the mean gradient.
    # Clip the norm of all gradients to this; 0: off.
    clip_norm: Annotated[float, Ge(0), Le(1e12)] = 1.0
    # Steps of linear warmup of the learning rate; a short run has one step less than its length.
    warmup_steps: Annotated[int, Ge(0), Le(10**9)] = 10
    decay: Literal["linear", "cosine", "inverse_sqrt"] = "linear"  # Learning rate after warmup.
    # Learning rate at the end, as a fraction of the largest.
    final_learning_rate: Annotated[float, Ge(0), Le(1e6)] = 0.0
    # The largest; see decay. None: 0.014 for Muon, by d_model for AdamW, or chosen with the size;
    # 0.001 with LoRA, whose updates AdamW trains.
    learning_rate: Auto[Annotated[float, Ge(0), Le(1e6)]] = AUTO
    # Factor on the rate of an untied token embedding. None: 1; Muon: 2.1, or 3 with --init-from.
    embedding_rate: Auto[Annotated[float, Gt(0), Le(1e6)]] = AUTO
    # Weight decay of all matrices, decoupled. None: 0.1, or chosen with the size.
    weight_decay: Auto[Annotated[float, Ge(0), Le(1e6)]] = AUTO
    # First fraction of the run, in which the first block attends to 16 tokens only. None: 0.2;
    # for vocabularies up to 512 and with --init-from, 0.
    window_warmup: Auto[Annotated[float, Ge(0), Le(1)]] = AUTO


class OptimizerKind(NamedTuple):
    """How to build an optimizer, and its default settings."""

    # Called with parameter groups, config, distributed context and dtype of matrix products.
    build: Callable[..., GroupedOptimizer | torch.optim.Optimizer]
    learning_rate: float | Callable[[int], float]  # or a function of d_model
    embedding_rate: float = 1.0  # of an untied token embedding
    is_for_matrices: bool = False  # of the blocks only, and AdamW updates the other parameters
    is_capturable: bool = False  # in a CUDA graph: with a tensor as the learning rate
    fine_tuning_embedding_rate: float = 1.0


def build_adamw(params: list[ParamGroup], config: OptimizerConfig, *_: Any) -> AdamW:
    return AdamW(params, betas=(config.beta1, config.beta2))


def adamw_learning_rate(d_model: int) -> float:
    """Return a rate in inverse proportion to the width (Yang et al. 2021), as in the presets."""
    return max(6e-4, min(3e-3, 3e-3 * 128 / d_model))


# Any optimizer with the interface of torch.optim.Optimizer can be added here, and its name to
# OptimizerConfig.optimizer: "lion": OptimizerKind(lambda params, *_: Lion(params), 1e-4).
OPTIMIZER_KINDS = {
    "muon": OptimizerKind(
        lambda params, config, dist_ctx, dtype: Muon(
            params, momentum=config.momentum, dist_ctx=dist_ctx, dtype=dtype
        ),
        0.014,
        embedding_rate=2.1,
        is_for_matrices=True,
        is_capturable=True,
        fine_tuning_embedding_rate=3.0,
    ),
    "adamw": OptimizerKind(build_adamw, adamw_learning_rate, is_capturable=True),
}


def default_rates(
    optimizer: str, d_model: int, tokens_per_step: int, is_fine_tuning: bool = False
) -> dict[str, Any]:
    """Return the default rates of an optimizer: a value for every field that may be None."""
    kind = OPTIMIZER_KINDS[optimizer]
    rate = kind.learning_rate
    embedding_rate = kind.fine_tuning_embedding_rate if is_fine_tuning else kind.embedding_rate
    return {
        "learning_rate": rate(d_model) if callable(rate) else rate,
        "embedding_rate": embedding_rate,
        "beta2": FINE_TUNING_BETA2 if is_fine_tuning else default_beta2(tokens_per_step),
        "weight_decay": 0.1,
        "window_warmup": 0.0,
    }


def default_beta2(tokens_per_step: int) -> float:
    """Return AdamW's decay rate of the mean squared gradient, by the tokens of an optimizer step.

    In a small batch most rows of an embedding have no gradient: 0.99 averages over more steps. 0.95
    is the value for 0.5M tokens (Brown et al. 2020, appendix B). Between, it is linear in the log.
    """
    log_tokens = [math.log(tokens) for tokens in (tokens_per_step, *BETA2_BY_TOKENS)]
    return float(np.interp(log_tokens[0], log_tokens[1:], [*BETA2_BY_TOKENS.values()]))


def learning_rate_at(step: int, num_steps: float, config: OptimizerConfig) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) of ``num_steps``."""
    warmup = min(config.warmup_steps, num_steps - 1)
    progress = (step - warmup) / max(1, num_steps - warmup)
    if step < warmup:
        factor = (step + 1) / warmup
    elif config.decay == "inverse_sqrt":  # Vaswani et al. 2017, eq. 3
        factor = math.sqrt(max(1, warmup) / (step + 1))
    else:
        factor = 1 - progress
        if config.decay == "cosine":
            factor = (1 + math.cos(math.pi * progress)) / 2
        factor = config.final_learning_rate + (1 - config.final_learning_rate) * factor
    return config.learning_rate * factor


class Optimizer:
    """All optimizers of a model as one: each parameter is in one group, by the model's specs.

    A step whose gradient is not finite, or too large for Muon, changes nothing, on any rank.
    """

    def __init__(
        self,
        model: GPT,
        config: OptimizerConfig,
        dist_ctx: DistributedContext = SINGLE_PROCESS,
        dtype: torch.dtype = torch.float32,
        pool: GraphPool | None = None,
    ):
        """Update the parameters that require a gradient; ``dtype`` is that of matrix products.

        With a pool for captures, gradients stay where they are.
        """
        self.config = config
        self.dist_ctx = dist_ctx
        named_params = model.named_parameters()
        self.parameters = {name: param for name, param in named_params if param.requires_grad}
        kind = OPTIMIZER_KINDS[config.optimizer]
        matrix_dtype = dtype if dtype == torch.float32 else fast_dtype(dist_ctx.device)
        groups = self._make_groups(model.specs, kind)
        rest = []
        if kind.is_for_matrices:
            rest = [group for group in groups if group["role"] != "matrix"]
            groups = [group for group in groups if group["role"] == "matrix"]
        self.optimizers = [kind.build(groups, config, dist_ctx, matrix_dtype)]
        if rest:
            self.optimizers.append(build_adamw(rest, config))
        self.pool = pool
        self.captured_norm = CapturedCalls(pool)
        self.captured_update = CapturedCalls(pool)
        # Also where nothing is captured, so that captured steps are equal to plain ones.
        self.has_rate_in_tensor = kind.is_capturable and dist_ctx.device.type in GRAPH_POOLS
        self.is_loss_scaled = dtype == torch.float16
        loss_scale = INITIAL_LOSS_SCALE if self.is_loss_scaled else 1.0
        counts = dict.fromkeys(("good_steps", "skipped", "skipped_in_a_row"), 0.0)
        self.loss_scaler = {"loss_scale": loss_scale, **counts}

    def _make_groups(self, specs: Specs, kind: OptimizerKind) -> list[ParamGroup]:
        """Return the parameters in groups of one role and rate, for matrices also of one shape.

        The parameters of a stack, which Muon takes as one matrix, follow each other.
        """
        stacks: dict[tuple[str, float, str], list[Tensor]] = {}  # by role, rate, and name of stack
        for name, parameter in self.parameters.items():
            spec = specs[name]
            is_stacked = kind.is_for_matrices and spec.group == "matrix"
            key = (spec.group, spec.lr_scale, spec.stack if is_stacked else "")
            stacks.setdefault(key, []).append(parameter)
        groups: dict[tuple, ParamGroup] = {}
        for (role, lr_scale, stack), params in stacks.items():
            shape = params[0].shape if stack else None
            stack_size = len(params) if stack else 1
            if role == "embedding":
                lr_scale *= self.config.embedding_rate
            empty_group: ParamGroup = {
                "params": [],
                "role": role,
                "stack_size": stack_size,
                "lr_scale": lr_scale,
                "lr": self.config.learning_rate * lr_scale,
                "weight_decay": 0.0 if role in ("vector", "adapter") else self.config.weight_decay,
            }
            group = groups.setdefault((role, lr_scale, stack_size, shape), empty_group)
            group["params"] += params
        return list(groups.values())

    @property
    def loss_scale(self) -> float:
        """The factor of the loss whose gradients are in the parameters."""
        return self.loss_scaler["loss_scale"]

    def step(self, step: int, num_steps: float) -> tuple[float, Tensor]:
        """Clip the gradients, update every parameter, and drop the gradients.

        Returns the learning rate of optimizer step ``step`` (from 0), and the norm of the gradients
        before clipping. Like torch.amp.GradScaler, it waits for the device once.
        """
        learning_rate = learning_rate_at(step, num_steps, self.config)
        norm = self.captured_norm(self.gradient_norm) / self.loss_scale
        is_clipped = 0 < self.config.clip_norm <= MAX_GRADIENT_NORM
        max_norm = math.inf if is_clipped else MAX_GRADIENT_NORM
        is_usable = bool(norm.isfinite() & (norm <= max_norm))
        if is_usable:
            factor = self.clip_factor(norm)
            if self.has_rate_in_tensor:
                self.captured_update(self.update, torch.full_like(factor, learning_rate), factor)
            else:
                self.update(learning_rate, factor)
        if self.pool is None or not self.pool.is_enabled:
            for parameter in self.parameters.values():
                parameter.grad = None
        self._update_loss_scaler(is_usable)
        return learning_rate, norm

    @torch.no_grad()
    def average_parameters(self, weight: float, replace: bool) -> None:
        """Move the average of each parameter, saved with its state, towards it; or replace it."""
        for name, state in self._parameter_states().items():
            parameter = self.parameters[name].detach()
            average = state.setdefault("average", parameter.clone())
            local(average).lerp_(local(parameter), weight)
            if replace:
                local(parameter).copy_(local(average))

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients, with the loss scale."""
        grads = [param.grad for param in self.parameters.values() if param.grad is not None]
        return self.dist_ctx.norm(grads)

    def clip_factor(self, norm: Tensor) -> Tensor:
        """Return the factor that undoes the loss scale and clips gradients of this norm."""
        factor = torch.ones_like(norm)
        if self.config.clip_norm:
            factor = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1)
        return factor / self.loss_scale

    def update(self, learning_rate: float | Tensor, factor: Tensor) -> None:
        """Multiply the gradients by a factor, and update every parameter from them."""
        if self.config.clip_norm or self.is_loss_scaled:
            grads = [param.grad for param in self.parameters.values() if param.grad is not None]
            torch._foreach_mul_([local(grad) for grad in grads], factor)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["lr_scale"]
            optimizer.step()

    def _update_loss_scaler(self, is_finite: bool) -> None:
        """Count skipped steps, and adapt the loss scale to them."""
        scaler = self.loss_scaler
        if not is_finite:
            scaler["skipped"] += 1
        scaler["skipped_in_a_row"] = 0.0 if is_finite else scaler["skipped_in_a_row"] + 1
        if not self.is_loss_scaled:
            return
        scaler["good_steps"] = scaler["good_steps"] + 1 if is_finite else 0.0
        if not is_finite:
            scaler["loss_scale"] /= 2
        elif scaler["good_steps"] >= NUM_STEPS_TO_DOUBLE_SCALE:
            scaler["loss_scale"] *= 2
            scaler["good_steps"] = 0.0

    def count_skipped(self, saved_step: int) -> int:
        """Return the number of skipped steps. Raises UserError for too many in a row."""
        num_in_a_row = int(self.loss_scaler["skipped_in_a_row"])
        if num_in_a_row >= MAX_SKIPPED_STEPS:
            problem = f"{num_in_a_row} steps in a row had gradients {UNUSABLE_GRADIENTS}"
            advice = f"Lower it, set --clip-norm or --dtype, and continue from step {saved_step:,}"
            raise UserError(f"--learning-rate: {problem}. {advice}.")
        return int(self.loss_scaler["skipped"])

    def _parameter_states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter, by its name."""
        states = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                states.update({param: optimizer.state[param] for param in group["params"]})
        return {name: states[parameter] for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return all state, as ``{parameter name}.{key}`` and ``loss_scaler.{key}``."""
        scaler = self.loss_scaler
        state = {f"loss_scaler.{key}": torch.tensor(value) for key, value in scaler.items()}
        for name, values in self._parameter_states().items():
            for key, value in values.items():
                if value is not None:
                    state[f"{name}.{key}"] = torch.as_tensor(value)
        return state

    def load_state(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Restore what :meth:`state` returned. Raises UserError for unknown parameters."""
        states = self._parameter_states()
        for name_and_key, value in state:
            name, key = name_and_key.rsplit(".", 1)
            if name == "loss_scaler":
                self.loss_scaler[key] = float(value[...])
            elif name not in states:
                raise UserError(f"--resume: the model has no parameter {name} (got {name_and_key})")
            elif len(value.shape) == 0:
                states[name][key] = value[...].clone()
            else:
                states[name][key] = shard_like(value, self.parameters[name])
        for optimizer in self.optimizers:  # moves scalars to the devices that they must be on
            optimizer.load_state_dict(optimizer.state_dict())
        if self.is_loss_scaled != (self.loss_scale > 1):  # the dtype changed
            self.loss_scaler["loss_scale"] = INITIAL_LOSS_SCALE if self.is_loss_scaled else 1.0
