"""Loss of preferences: the losses that the options name, with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightrft.algorithms.interface import PreferenceLossTraits, preference_loss_traits
from lightrft.algorithms.preference_losses import AnswerSums, PreferenceSums
from lightrft.config import ConfigError, PreferenceOptions
from lightrft.config.registry import PREFERENCE_LOSSES, bind, keyword_options

LossFunction = Callable[[PreferenceSums], Tensor]


@dataclass(frozen=True, slots=True)
class PreferenceTerm:
    """Loss with its hyper-parameters, traits and weight."""

    name: str
    loss: LossFunction
    traits: PreferenceLossTraits
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Weighted sum of the means of some losses.

    Args:
        terms: Losses; the first one defines how metrics compare answers.
        beta: Scale of the displayed rewards.
    """

    terms: tuple[PreferenceTerm, ...]
    beta: float = 1.0

    @property
    def uses_reference(self) -> bool:
        """Return whether a loss reads logprobs of the reference."""
        return any(term.traits.uses_reference for term in self.terms)

    @property
    def couples_pairs(self) -> bool:
        """Return whether the loss of a pair depends on the others."""
        return any(term.traits.couples_pairs for term in self.terms)

    @property
    def uses_kl(self) -> bool:
        """Return whether a loss reads the log-ratio of answers to other prompts."""
        return any(term.traits.uses_kl for term in self.terms)

    def share(self, sums: PreferenceSums, counts: tuple[int, int]) -> Tensor:
        """Return the share [] of some pairs in the loss of the step; all shares add up to it.

        Args:
            sums: Sums of the pairs.
            counts: Items (pairs, or labelled answers) and answers of the step, over all ranks.
        """
        num_items, num_answers = counts
        shares = [
            term.weight
            * term.loss(sums).sum()
            / (num_answers if term.traits.is_of_answers else num_items)
            for term in self.terms
        ]
        return torch.stack(shares).sum()

    def rewards(self, sums: PreferenceSums) -> tuple[Tensor, Tensor]:
        """Return rewards [answers] of chosen and of rejected answers, by the first loss."""
        traits = self.terms[0].traits

        def reward(answers: AnswerSums) -> Tensor:
            values = answers.log_ratios if traits.uses_reference else answers.logprobs
            return self.beta * values.detach() / (answers.num_tokens if traits.is_per_token else 1)

        return reward(sums.chosen), reward(sums.rejected)


def build_loss(config: PreferenceOptions) -> PreferenceLoss:
    """Load the losses, bind their hyper-parameters, and try them on an example.

    Raises:
        ConfigError: Unknown names or hyper-parameters, wrong weights, or a function that fails on
            the example.
    """
    names, all_args = config.preference_loss, config.preference_args or {}
    weights = config.preference_weights or (1.0,) * len(names)
    if not names or len(weights) != len(names):
        raise ConfigError(
            f"preference_weights: got {len(weights)} for {len(names)} losses, expected one for "
            "each of preference_loss"
        )
    functions = [cast("Callable[..., Tensor]", PREFERENCE_LOSSES.load(name)) for name in names]
    known = {option for function in functions for option in keyword_options(function)}
    unknown = [name for name in all_args if name not in known]
    if unknown:
        raise ConfigError(
            f"preference_args: {', '.join(unknown)} does nothing for preference_loss "
            f"{' '.join(names)}: expected {', '.join(sorted(known)) or 'none'}"
        )
    terms = []
    for name, function, weight in zip(names, functions, weights, strict=True):
        args = {key: value for key, value in all_args.items() if key in keyword_options(function)}
        bound = bind(function, args, owner=f"preference_loss {name}")
        term = PreferenceTerm(name, bound, preference_loss_traits(function), weight)
        _try_term(term)
        terms.append(term)
    beta = keyword_options(terms[0].loss).get("beta")
    return PreferenceLoss(tuple(terms), 1.0 if beta is None else float(beta.default))


def _try_term(term: PreferenceTerm) -> None:
    """Run a loss on an example.

    Raises:
        ConfigError: It raises, or its result is not the expected one.
    """
    logprobs = -torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    logprobs.requires_grad_()
    chosen, rejected = (
        AnswerSums(each, each.detach() + 0.1 * n, torch.full_like(each, 4.0).detach())
        for n, each in enumerate(logprobs)
    )
    try:
        result: object = term.loss(PreferenceSums(chosen, rejected, 4.0, 0.1))
    except Exception as error:
        raise ConfigError(
            f"preference_loss {term.name} fails on an example: {' '.join(str(error).split())}"
        ) from error
    size = 6 if term.traits.is_of_answers else 3
    is_right = isinstance(result, Tensor) and result.shape == (size,) and result.requires_grad
    if not is_right or not bool(cast("Tensor", result).isfinite().all()):
        raise ConfigError(
            f"preference_loss {term.name}: expected {size} finite numbers with a gradient from 3 "
            "pairs, from a function (PreferenceSums, *, hyper-parameters)"
        )
