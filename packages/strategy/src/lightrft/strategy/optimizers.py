"""Optimizers: groups, learning rates, gradient norms, float32 masters, micro-batches of a step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR

from lightrft.config import ConfigError, TrainingOptions
from lightrft.config.options import accepts, coerce, type_hints

# One group for `torch.optim`: "params" and "weight_decay".
ParameterGroup = dict[str, "list[nn.Parameter] | float"]
# Suffix of an optimizer's state that has one number per block of another state.
SCALE = "_scale"
# Key of a group's factor, beside its learning rate.
FACTOR = "rate_factor"
# Most names of parts that a refusal shows.
MAX_PARTS = 20


@dataclass(frozen=True, slots=True)
class OptimizerStepResult:
    """Result of an `optimizer_step` call that ends a step.

    Args:
        grad_norm: Global gradient norm before clipping, over all groups and ranks.
        is_skipped: Gradients were not finite on some rank; nothing was changed.
        learning_rate: Rate of the first group, as used in this step.
    """

    grad_norm: float
    is_skipped: bool
    learning_rate: float


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[ParameterGroup]:
    """Split trainable parameters into decayed matrices and undecayed vectors.

    A parameter is decayed if and only if its shape has two or more dimensions, so biases
    and norm gains of every architecture are exempt. Tied parameters appear once.

    Source: Loshchilov & Hutter 2017, arXiv:1711.05101; the usual exemption of biases and gains.

    Args:
        named_parameters: Result of `Module.named_parameters()`.
        weight_decay: Decay of the first group; the second has 0.

    Returns:
        One or two non-empty groups.

    Raises:
        ValueError: No parameter requires gradients.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[int] = set()
    for _, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        (decayed if parameter.dim() >= 2 else exempt).append(parameter)
    if not seen:
        raise ValueError("no parameter requires gradients: nothing to optimize")
    groups: list[ParameterGroup] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def rate_factor(name: str, factors: Mapping[str, float]) -> float:
    r"""Return a parameter's factor: that of the first pattern that matches whole parts of its name.

    Args:
        name: Dotted name, such as `model.visual.blocks.0.attn.qkv.weight`.
        factors: Factors by regular expressions for one or more consecutive parts: `visual`,
            `visual\.merger`, `lora_B`.

    Returns:
        Factor, 1 if none matches.
    """
    pattern = _first_pattern(name, factors)
    return 1.0 if pattern is None else float(factors[pattern])


def _first_pattern(name: str, patterns: Iterable[str]) -> str | None:
    hits = (part for part in patterns if re.search(rf"(?:^|\.)(?:{part})(?:\.|$)", name))
    return next(hits, None)


def with_rate_factors(
    groups: Sequence[ParameterGroup],
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    rate: float,
    factors: Mapping[str, float],
) -> Sequence[ParameterGroup]:
    """Split groups of an optimizer so that each has one rate; unchanged without factors.

    Source: with `lora_B` alone, LoRA+: Hayou et al. 2024, arXiv:2402.12354.

    Args:
        groups: See `parameter_groups`.
        named_parameters: Named parameters of the module.
        rate: Learning rate of the factor 1.
        factors: See `rate_factor`.

    Returns:
        Groups that have `lr` and `rate_factor`, in the order of `groups`, then of `factors`.
    """
    if not factors:
        return groups
    factors_by_id = {id(value): rate_factor(name, factors) for name, value in named_parameters}
    split_groups: list[ParameterGroup] = []
    for group in groups:
        parts: dict[float, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:  # type: ignore[union-attr]
            parts[factors_by_id[id(parameter)]].append(parameter)
        order = dict.fromkeys([1.0, *map(float, factors.values())])
        split_groups += [
            {**group, "params": parts[factor], "lr": rate * factor, FACTOR: factor}
            for factor in order
            if factor in parts
        ]
    return split_groups


def unscaled_rate(optimizer: Optimizer) -> float:
    """Return the current learning rate of parameters without a factor."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / float(group.get(FACTOR, 1.0))


def check_rate_factors(factors: Mapping[str, float], models: Sequence[nn.Module]) -> None:
    """Check that each factor has a trained weight.

    Raises:
        ConfigError: A pattern matches no trained weight of any model, or only those that an
            earlier pattern takes.
    """
    names = [n for model in models for n, value in model.named_parameters() if value.requires_grad]
    used = {_first_pattern(name, factors) for name in names}
    for pattern in factors:
        if pattern in used:
            continue
        taken = [n for n in names if _first_pattern(n, [pattern]) is not None]
        if taken:
            raise ConfigError(
                f"learning_rate_factors: {pattern!r} has no effect, since earlier patterns take "
                f"all its weights ({_first_pattern(taken[0], factors)!r} that of {taken[0]}): put "
                "it before them"
            )
        parts = list(dict.fromkeys(p for n in names for p in n.split(".") if not p.isdigit()))
        shown = ", ".join(parts[:MAX_PARTS]) + (", ..." if len(parts) > MAX_PARTS else "")
        raise ConfigError(
            f"learning_rate_factors: no trained weight has {pattern!r} as a part of its name; "
            f"there are {shown}"
        )


COSINE = "cosine_with_min_lr"
# Factor after the warm-up at p = (s - w) / (T - w), at most 1, with r = min_lr_ratio.
LR_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    COSINE: lambda p, r: 0.5 * (1.0 + math.cos(math.pi * p)) * (1.0 - r) + r,
    "linear": lambda p, r: 1.0 - p,
    "constant": lambda p, r: 1.0,
}


@dataclass(slots=True)
class LearningRatePlan:
    """Factor of the peak learning rate at every optimizer step of a run.

    s < w: (s + 1) / (w + 1), above 0 from the first step on; then the schedule's decay, constant
    after T. If the length of a run changed at step c, the factor goes from its former value to the
    new plan's in as many steps as the warm-up has:
    f(s) + gap * (1 - (s - c + 1) / (n + 1)), n = max(1, w).

    Args:
        name: Key of `LR_SCHEDULES`.
        num_warmup_steps: w.
        num_training_steps: T.
        min_lr_ratio: r, final over peak learning rate of the cosine.
        changed_at: c, the first step after the change; -1 without one.
        gap: The former plan's factor less this plan's at step c.
    """

    name: str
    num_warmup_steps: int
    num_training_steps: int
    min_lr_ratio: float
    changed_at: int = -1
    gap: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the factor at optimizer step s, counted from 0."""
        num_return = max(1, self.num_warmup_steps)
        passed = step - self.changed_at + 1
        share = max(0.0, 1.0 - passed / (num_return + 1)) if self.changed_at >= 0 else 0.0
        return self._planned(step) + self.gap * share

    def _planned(self, step: int) -> float:
        num_warmup, length = self.num_warmup_steps, self.num_training_steps
        if step < num_warmup:
            return (step + 1) / (num_warmup + 1)
        progress = (step - num_warmup) / (length - num_warmup) if step < length else 1.0
        return max(0.0, LR_SCHEDULES[self.name](progress, self.min_lr_ratio))


class PlannedLR(LambdaLR):
    """A schedule that goes on without a jump if a continued run has another length."""

    def __init__(self, optimizer: Optimizer, plan: LearningRatePlan) -> None:
        self.plan = plan
        self.change = ""
        super().__init__(optimizer, lambda step: self.plan(step))

    def state_dict(self) -> dict[str, object]:
        """Return position and plan as plain values."""
        state: dict[str, object] = super().state_dict()
        return {**state, "plan": asdict(self.plan), "lr_lambdas": [None] * len(self.lr_lambdas)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Restore the position; of the plan, only its past changes.

        `change` then reports whether the run is planned differently than before.
        """
        planned = self.plan
        former = LearningRatePlan(**state_dict["plan"])  # type: ignore[arg-type]
        super().load_state_dict({**state_dict, "plan": former, "change": ""})
        length = planned.num_training_steps
        if replace(former, changed_at=planned.changed_at, gap=planned.gap) == planned:
            return
        step = self.last_epoch
        gap = former(step) - planned._planned(step)
        self.plan = replace(planned, changed_at=step, gap=gap)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.plan(step)
        rates = [self.base_lrs[0] * factor for factor in (former(step), self.plan(step))]
        what = f"planned for {former.num_training_steps} optimizer steps, now for {length}"
        if former.num_training_steps == length:
            what = "another schedule"
        self.change = (
            f"{what}: goes on from {rates[0]:.3g} with {rates[1]:.3g} and reaches the new plan in "
            f"{max(1, planned.num_warmup_steps)} steps"
        )


def learning_rate_schedule(
    config: TrainingOptions, optimizer: Optimizer, *, max_steps: int
) -> PlannedLR:
    """Return the chosen schedule, warming up over ceil(max_steps * lr_warmup_ratio) steps.

    Args:
        config: Options with `lr_scheduler`, `lr_warmup_ratio` and `min_lr_ratio`.
        optimizer: Optimizer; its groups' current learning rates are the peaks.
        max_steps: Optimizer steps of the whole run.
    """
    num_warmup = math.ceil(max_steps * config.lr_warmup_ratio)
    plan = LearningRatePlan(config.lr_scheduler, num_warmup, max_steps, config.min_lr_ratio)
    return PlannedLR(optimizer, plan)


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, over its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the global 2-norm of local gradients in float32.

    Returns:
        Scalar float32; 0 without gradients.
    """
    norms = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float32)
        for p in parameters
        if p.grad is not None
    ]
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))


def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients, sharded or whole, to a global norm of at most `max_norm`; 0 never does."""
    factor = max_norm / (norm + 1e-6)
    if max_norm <= 0 or factor >= 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Numbers of one Adam optimizer.

    Args:
        lr: Peak learning rate.
        betas: Decay rates of the two moments.
        eps: Term added to the root of the second moment.
        weight_decay: Decoupled decay of matrices.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def read(cls, kwargs: Mapping[str, object], config: TrainingOptions) -> AdamSettings:
        """Read keywords of `create_optimizer`; the configuration supplies missing ones.

        Raises:
            TypeError: Unknown keywords, or values of a wrong type.
        """
        values = {
            **asdict(cls(config.peak_learning_rate, config.adam_betas, 1e-8, config.l2)),
            **kwargs,
        }
        hints = type_hints(cls)
        unknown = sorted(set(values) - set(hints))
        if unknown:
            raise TypeError(f"create_optimizer knows {sorted(hints)}, got {', '.join(unknown)}")
        for name, hint in hints.items():
            values[name] = coerce(values[name], hint)
            if not accepts(values[name], hint):
                raise TypeError(f"{name} must be {hint}, got {values[name]!r}")
        return cls(**values)

    @classmethod
    def of(cls, group: Mapping[str, object]) -> Self:
        """Return the numbers of a group of an optimizer."""
        return cls(*(group[name] for name in type_hints(cls)))  # type: ignore[arg-type]


def adam_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    settings: AdamSettings,
    *,
    fused: bool,
) -> None:
    """Take a step of AdamW on parameters with their states of torch's names."""
    adamw(
        list(parameters),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=fused,
        foreach=False,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )


class MasterWeightsAdamW(Optimizer):
    """AdamW whose state holds a float32 master of every parameter.

    The update is computed on the masters, which are then rounded into the parameters, so that
    steps smaller than half a bfloat16 unit add up instead of being lost.

    Source: Micikevicius et al. 2017, arXiv:1710.03740, sec. 3.1; Loshchilov & Hutter 2017,
    arXiv:1711.05101, algorithm 2.

    Args:
        groups: Parameter groups.
        settings: Learning rate and the like; groups may override the decay.
    """

    def __init__(self, groups: Iterable[ParameterGroup], settings: AdamSettings) -> None:
        # `fused` is read when states are loaded: its counters lie beside the parameters.
        super().__init__(groups, {**asdict(settings), "fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            ValueError: A closure was passed.
        """
        if closure is not None:
            raise ValueError("MasterWeightsAdamW takes no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            masters = [state["master"] for state in states]
            gradients = [parameter.grad.float() for parameter in parameters]
            adam_step(masters, gradients, states, AdamSettings.of(group), fused=True)
            for parameter, state in zip(parameters, states, strict=True):
                parameter.copy_(state["master"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["master"] = parameter.detach().float().clone()
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
        return state


@dataclass(slots=True)
class AccumulationState:
    """Progress of one optimizer inside its current optimizer step.

    Args:
        num_micro_batches: Micro-batches of one optimizer step.
        takes_shares: The loss is this micro-batch's share of the batch loss (inside
            `ModelTraining.accumulation`) rather than the micro-batch's mean.
        num_done: Micro-batches of the current step whose `optimizer_step` has been called.
        sp_size: Ranks that work on one micro-batch together; their gradients are parts of one.
    """

    num_micro_batches: int
    takes_shares: bool = False
    num_done: int = 0
    sp_size: int = 1

    def loss_scale(self, num_averaging_ranks: int) -> float:
        """Return the factor that turns the caller's loss into the one to differentiate.

        Args:
            num_averaging_ranks: Ranks over which the backend averages gradients.
        """
        if self.takes_shares:
            return float(num_averaging_ranks)
        # The mean is over the micro-batches of all data-parallel groups, not of all ranks.
        return self.sp_size / self.num_micro_batches

    def is_last(self) -> bool:
        """Return whether the optimizer acts after the current micro-batch."""
        return self.num_done == self.num_micro_batches - 1

    def advance(self) -> bool:
        """Count one call of `optimizer_step`.

        Returns:
            Whether the optimizer must act now; the count then starts again.

        Raises:
            RuntimeError: More calls than `accumulation` announced.
        """
        if self.num_done >= self.num_micro_batches:
            raise RuntimeError(
                f"optimizer_step was called more than {self.num_micro_batches} times inside "
                "strategy.accumulation: announce the right number of micro-batches"
            )
        acts = self.is_last()
        self.num_done += 1
        if acts and not self.takes_shares:
            self.num_done = 0
        return acts
