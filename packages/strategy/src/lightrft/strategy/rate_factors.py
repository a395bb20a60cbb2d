"""Learning rates of parts of a model, as factors of the model's own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from lightrft.config import ConfigError
from lightrft.strategy.optimizers import ParameterGroup

FACTOR = "rate_factor"
MAX_PARTS = 20
"""Of names, in a refusal."""


def rate_factor(name: str, factors: Mapping[str, float]) -> float:
    r"""The factor of a parameter: of the first pattern that matches whole parts of its name.

    Args:
        name: Dotted, such as `model.visual.blocks.0.attn.qkv.weight`.
        factors: By regular expressions for one or more consecutive parts: `visual`,
            `visual\.merger`, `lora_B`.

    Returns:
        1 where none matches.
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
    """Splits groups of an optimizer so that each has one learning rate; unchanged without factors.

    Source: with `lora_B` alone, LoRA+: Hayou et al. 2024, arXiv:2402.12354.

    Args:
        groups: See `parameter_groups`.
        named_parameters: Of the module.
        rate: Learning rate of the factor 1.
        factors: See `rate_factor`.

    Returns:
        Groups that have `lr` and `rate_factor`, in the order of the given ones, then of `factors`.
    """
    if not factors:
        return groups
    own = {id(value): rate_factor(name, factors) for name, value in named_parameters}
    found: list[ParameterGroup] = []
    for group in groups:
        parts: dict[float, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:  # type: ignore[union-attr]
            parts[own[id(parameter)]].append(parameter)
        order = dict.fromkeys([1.0, *map(float, factors.values())])
        found += [
            {**group, "params": parts[factor], "lr": rate * factor, FACTOR: factor}
            for factor in order
            if factor in parts
        ]
    return found


def unscaled_rate(optimizer: Optimizer) -> float:
    """The learning rate now of parameters that have no factor."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / float(group.get(FACTOR, 1.0))


def check_rate_factors(factors: Mapping[str, float], models: Sequence[nn.Module]) -> None:
    """Looks for a trained weight that each factor is for.

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
