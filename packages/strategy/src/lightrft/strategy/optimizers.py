"""Parameter groups, learning rate schedules, gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightrft.strategy.config import StrategyConfig

# What `torch.optim` takes as one group: "params" and "weight_decay".
ParameterGroup = dict[str, "list[nn.Parameter] | float"]


@dataclass(frozen=True, slots=True)
class OptimizerStepResult:
    """What one acting call of `optimizer_step` did.

    Args:
        grad_norm: Global gradient norm before clipping, over all groups and ranks.
        is_skipped: Gradients were not finite on some rank; nothing was changed.
        learning_rate: Of the first group, as used in this step.
    """

    grad_norm: float
    is_skipped: bool
    learning_rate: float


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[ParameterGroup]:
    """Splits trainable parameters into decayed matrices and undecayed vectors.

    A parameter is decayed if and only if its logical shape has two or more dimensions, so biases
    and norm gains of every architecture are exempt. Tied parameters appear once.

    Source: Loshchilov & Hutter 2017, arXiv:1711.05101; the usual exemption of biases and gains.

    Args:
        named_parameters: As from `Module.named_parameters()`.
        weight_decay: Decay of the first group; the second has 0.
        shapes: Logical shape by name where the parameter itself holds a flat shard.

    Returns:
        One or two non-empty groups.

    Raises:
        ValueError: No parameter requires gradients.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        shape = tuple(parameter.shape) if shapes is None else shapes.get(name, parameter.shape)
        (decayed if len(shape) >= 2 else exempt).append(parameter)
    if not seen:
        raise ValueError("no parameter requires gradients: nothing to optimize")
    groups: list[ParameterGroup] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cosine_with_min_lr_factor(
    step: int, *, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float
) -> float:
    """Factor of the peak learning rate at an optimizer step.

    s < w: s / max(1, w);  else  max(0, f (1 - r) + r),  f = (1 + cos(pi p)) / 2,
    p = min(1, (s - w) / max(1, T - w)): it stays at r after T.

    Args:
        step: s, optimizer steps taken.
        num_warmup_steps: w.
        num_training_steps: T.
        min_lr_ratio: r, final over peak learning rate.
    """
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return max(0.0, cosine * (1.0 - min_lr_ratio) + min_lr_ratio)


COSINE = "cosine_with_min_lr"
# Ours -> the name of `transformers.get_scheduler`. Its cosine rises again after the last step.
LR_SCHEDULES = {COSINE: COSINE, "linear": "linear", "constant": "constant_with_warmup"}


def learning_rate_schedule(
    config: StrategyConfig, optimizer: Optimizer, *, max_steps: int
) -> LambdaLR:
    """The chosen schedule with a linear warm-up over ceil(max_steps * lr_warmup_ratio) steps.

    Args:
        config: Has `lr_scheduler`, `lr_warmup_ratio` and `min_lr_ratio`.
        optimizer: Its groups' current learning rates are the peaks.
        max_steps: Optimizer steps of the whole run.

    Raises:
        ValueError: Unknown name; the message lists the known ones.
    """
    name = config.lr_scheduler
    if name not in LR_SCHEDULES:
        raise ValueError(f"unknown lr_scheduler {name!r}: expected one of {list(LR_SCHEDULES)}")
    steps = {
        "num_warmup_steps": math.ceil(max_steps * config.lr_warmup_ratio),
        "num_training_steps": max_steps,
    }
    if name == COSINE:
        factor = partial(cosine_with_min_lr_factor, min_lr_ratio=config.min_lr_ratio, **steps)
        return LambdaLR(optimizer, factor)
    from transformers import get_scheduler

    schedule: LambdaLR = get_scheduler(LR_SCHEDULES[name], optimizer, **steps)
    return schedule


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, over its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Global 2-norm of local gradients in float32.

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
    """Scales gradients, sharded or whole, to a global norm of at most `max_norm`; 0 never does."""
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
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def read(cls, kwargs: Mapping[str, object], config: StrategyConfig) -> AdamSettings:
        """From the keywords of `create_optimizer`; what is missing comes from the configuration.

        Raises:
            TypeError: Unknown keywords, or values of a wrong type.
        """
        values: dict[str, object] = {
            "lr": config.actor_learning_rate,
            "betas": config.adam_betas,
            "eps": 1e-8,
            "weight_decay": config.l2,
        }
        unknown = sorted(set(kwargs) - set(values))
        if unknown:
            raise TypeError(f"create_optimizer knows {sorted(values)}, got {', '.join(unknown)}")
        values.update(kwargs)
        betas = values["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        return cls(
            lr=_number(values["lr"], "lr"),
            betas=(_number(betas[0], "betas"), _number(betas[1], "betas")),
            eps=_number(values["eps"], "eps"),
            weight_decay=_number(values["weight_decay"], "weight_decay"),
        )


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)
