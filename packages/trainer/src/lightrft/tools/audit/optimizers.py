"""Learning rates, clipping, and the steps of SGD, Adam and AdamW."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.config.parts.training import TrainingOptions
from lightrft.tools.audit.record import OptimizerFacts

DECOUPLED = ("AdamW", "MasterWeightsAdamW")
ADAM = ("Adam", *DECOUPLED)
KNOWN = (*ADAM, "SGD")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
ADAM_EPS, BETAS = 1e-8, (0.9, 0.999)
SINGLE = ("eps", "weight_decay", "momentum")


def learning_rate(
    peak: float, position: int, num_steps: int, facts: OptimizerFacts, config: TrainingOptions
) -> float:
    """Return the learning rate after `position` of the run's `num_steps` optimizer steps.

    After a change of the run's length, the factor approaches the new plan over as many steps as the
    warm-up has.
    """
    warmup = math.ceil(num_steps * config.lr_warmup_ratio)
    factor = _planned(position, num_steps, warmup, config)
    if facts.schedule_changed_at >= 0:
        passed = position - facts.schedule_changed_at + 1
        factor += facts.schedule_gap * max(0.0, 1 - passed / (max(1, warmup) + 1))
    return peak * factor


def _planned(position: int, num_steps: int, warmup: int, config: TrainingOptions) -> float:
    if position < warmup:
        return (position + 1) / (warmup + 1)
    if config.lr_scheduler == "constant":
        return 1.0
    progress = min(1.0, (position - warmup) / (num_steps - warmup)) if num_steps > warmup else 1.0
    if config.lr_scheduler == "linear":
        return 1 - progress
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return cosine * (1 - config.min_lr_ratio) + config.min_lr_ratio


@dataclass(slots=True)
class ParameterNumbers:
    """Hyper-parameters of one parameter."""

    rate_share: float = 1.0
    betas: tuple[float, float] = BETAS
    eps: float = ADAM_EPS
    weight_decay: float = 0.0
    momentum: float = 0.0


@dataclass(slots=True)
class Optimizer:
    """Parameters and optimizer states of one model in float64.

    Args:
        kind: Class of the run's optimizer.
        weights: Weights by name; a step replaces one.
        groups: Hyper-parameters of each trained parameter, by name.
        moments: Adam's moments and counters or SGD's momentum: KEY/NAME.
    """

    kind: str
    weights: dict[str, Tensor]
    groups: Mapping[str, ParameterNumbers]
    moments: dict[str, Tensor] = field(default_factory=dict)

    def step(self, name: str, slope: Tensor, rate: float) -> None:
        """Update a weight once.

        Args:
            name: Name of the weight.
            slope: Clipped gradient.
            rate: Learning rate of the first group.
        """
        group, weight = self.groups[name], self.weights[name]
        rate *= group.rate_share
        if self.kind in DECOUPLED:
            weight = weight * (1 - rate * group.weight_decay)
        else:
            slope = slope + group.weight_decay * weight
        if self.kind == "SGD":
            before = self.moments.get(f"momentum_buffer/{name}")
            change = slope if before is None else group.momentum * before + slope
            if group.momentum:
                self.moments[f"momentum_buffer/{name}"] = change
            self.weights[name] = weight - rate * change
            return
        first, second, count = (
            self.moments.get(f"{key}/{name}", torch.zeros(())) for key in MOMENTS
        )
        (beta1, beta2), count = group.betas, count + 1
        first = beta1 * first + (1 - beta1) * slope
        second = beta2 * second + (1 - beta2) * slope**2
        corrected = (second / (1 - beta2 ** float(count))).sqrt() + group.eps
        change = first / (1 - beta1 ** float(count)) / corrected
        self.weights[name] = weight - rate * change
        for key, value in zip(MOMENTS, (first, second, count), strict=True):
            self.moments[f"{key}/{name}"] = value


def as_double(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors in float64."""
    return {name: value.to(torch.float64) for name, value in state.items()}


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor of gradient clipping; a limit of 0 never clips."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def stored_groups(facts: OptimizerFacts) -> dict[str, ParameterNumbers]:
    """Return each parameter's hyper-parameters in the run's optimizer."""
    groups: dict[str, ParameterNumbers] = {}
    first = 0.0
    for entry in facts.groups:
        numbers = entry["numbers"]
        rate = float(numbers.get("initial_lr", numbers.get("lr", 0)))
        first = first or rate / float(numbers.get("rate_factor", 1.0))
        beta1, beta2 = numbers.get("betas", BETAS)
        others = {key: float(numbers[key]) for key in SINGLE if key in numbers}
        share = rate / first if first else 1.0
        group = ParameterNumbers(share, (float(beta1), float(beta2)), **others)
        groups |= dict.fromkeys(entry["names"], group)
    return groups


def configured_groups(
    names: Collection[str], weights: Mapping[str, Tensor], config: TrainingOptions
) -> dict[str, ParameterNumbers]:
    """Return each parameter's hyper-parameters by the options: only matrices are decayed."""
    return {
        name: ParameterNumbers(
            _rate_share(name, config),
            config.adam_betas,
            ADAM_EPS,
            config.l2 if weights[name].dim() >= 2 else 0.0,
        )
        for name in weights
        if name in names
    }


def _rate_share(name: str, config: TrainingOptions) -> float:
    """Return the factor of the first option that matches a part of the parameter's name."""
    factors = (config.learning_rate_factors or {}).items()
    hits = (factor for part, factor in factors if re.search(rf"(^|\.)({part})(\.|$)", name))
    return float(next(hits, 1.0))
