"""Objectives of reinforcement learning: policy loss, KL term, entropy, and a critic's loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightrft.tools.audit.corrections import follows_policy
from lightrft.tools.audit.losses import (
    POLICY_LOSSES,
    Batch,
    kl_term,
    normalizer,
    token_shares,
    value_term,
)
from lightrft.tools.audit.models import Scorer
from lightrft.tools.audit.pairs import Borders, Differentiated, Pair, differentiated, with_rounding
from lightrft.tools.audit.replay import (
    Numbers,
    ReplayedStep,
    estimate,
    policy_options,
    score_models,
    token_weights,
)
from lightrft.tools.audit.updates import LossTerm, ReplayedLoss, Update


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of the updates.

    Args:
        numbers: Per-token numbers before the first update.
        advantages: Advantages of the run and recomputed ones.
        returns: Targets of a critic: [rows, seq].
        error: Rounding of advantages and returns.
    """

    numbers: Numbers
    advantages: Pair
    returns: Tensor
    error: float


class OfTokens(ReplayedLoss):
    """Loss that is a mean over tokens.

    Args:
        step, scorer, ended: See `ReplayedLoss`.
        inputs: Inputs of the updates.
    """

    def __init__(
        self, step: ReplayedStep, scorer: Scorer | None, inputs: Inputs, ended: str = ""
    ) -> None:
        super().__init__(step, scorer, ended)
        self.inputs, config = inputs, step.config
        loss = POLICY_LOSSES.get(config.policy_loss_name)
        self._mode = config.loss_agg_mode or (loss.aggregation if loss else "")

    def denominator(self, mask: Tensor) -> float:
        """Return Z of the loss aggregation."""
        config = self.step.config
        turns = config.max_turns if config.has_episodes else 1
        return normalizer(mask, self._mode, config.generate_max_len * turns)

    def share(self, mask: Tensor) -> Tensor:
        """Return each token's share of the mean: [rows, seq]."""
        return token_shares(mask, self._mode) / max(self.denominator(mask), 1e-300)


class PolicyReplay(OfTokens):
    """Loss of an actor on samples."""

    scores = "logprobs"

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[LossTerm]:
        """Yield the policy, KL and entropy terms."""
        step, numbers, mask = self.step, self.inputs.numbers, update.mask
        config, share = step.config, self.share(mask)
        weights = token_weights(step, numbers, self.inputs.advantages, mask, scores)
        if weights is not None and update.weights is not None:
            self._check_weights(update, update.weights, weights, error)
        factors = share if weights is None else share * weights
        yield LossTerm("policy", 1.0, *self._policy_term(update.micros, scores, factors, error))
        coef, reference = step.kl_coef, numbers.reference
        if config.use_kl_loss and coef > 0 and reference is not None:

            def kl_of(p: Pair, borders: Borders) -> Tensor:
                kl = kl_term(step.kl_estimator, p, reference, numbers.old, mask, borders)
                return share * kl

            # Scores of policy and reference have the same rounding error.
            shifts = (2 * error, -2 * error)
            yield LossTerm("kl", coef, *with_rounding(kl_of, scores, shifts, step.borders))
        if config.entropy_coef > 0:
            for entropy in others:
                exact = Differentiated(share * entropy, share)
                moved = Differentiated(share * error, torch.zeros_like(share))
                yield LossTerm("entropy", -config.entropy_coef, exact, moved, number=1)

    def _check_weights(self, update: Update, seen: Tensor, weights: Tensor, error: Tensor) -> None:
        """Compare token weights; those of the new policy carry the rounding of its scores."""
        floor = torch.zeros_like(weights)
        if follows_policy(self.step.config):
            floor = weights * error.sum(dim=1, keepdim=True)
        self.step.results.tokens(
            f"token weights, {update.name}",
            seen,
            weights,
            update.mask,
            "weights",
            scale=max(1.0, float(weights.abs().max())),
            floor=lambda: floor,
        )

    def _policy_term(
        self, micros: list[list[int]], new: Pair, weights: Tensor, error: Tensor
    ) -> tuple[Differentiated, Differentiated]:
        """Return the policy loss, and its change by rounding of scores and advantages."""
        step, old, advantages = self.step, self.inputs.numbers.old, self.inputs.advantages.exact
        loss, options = POLICY_LOSSES[step.config.policy_loss_name], policy_options(step.config)
        masks = torch.from_numpy(step.rows.mask)

        def of(scores: Pair, borders: Borders, shift: float = 0.0) -> Tensor:
            parts = []
            for rows in micros:
                p, q, mask = scores.at(rows), old.at(rows), masks[rows]
                batch = Batch(p, q, advantages[rows] + shift, mask, borders)
                values = torch.where(mask, loss.function(batch, options), 0.0)
                parts.append(values * weights[rows])
            return torch.cat(parts)

        exact, moved = with_rounding(of, new, (error, -error), step.borders)
        raised = partial(of, shift=self.inputs.error)
        further = exact.distance(differentiated(raised, new, Borders(step.borders.tolerance)))
        return exact, moved.plus(further)


class ValueObjective(OfTokens):
    """Loss of a critic."""

    scores = "values"

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[LossTerm]:
        """Yield the value term."""
        step, old, mask = self.step, self.inputs.numbers.values, update.mask
        share, returns, clip = self.share(mask), self.inputs.returns, step.config.value_clip
        if old is None:
            raise ValueError("the record has updates of a critic, but no values")

        def value_of(values: Pair, borders: Borders) -> Tensor:
            return share * value_term(values, old, returns, mask, clip=clip, borders=borders)

        # Targets have the rounding error of the values.
        shift = 2 * error + self.inputs.error
        yield LossTerm(
            "value", 1.0, *with_rounding(value_of, scores, (shift, -shift), step.borders)
        )


def _not_recorded(step: ReplayedStep) -> str:
    """Return which input of the actor's gradients is not recorded; "" if none."""
    config = step.config
    if config.policy_loss_name not in POLICY_LOSSES:
        return f"policy loss {config.policy_loss_name} is the caller's own"
    if config.pretrain_data is not None and config.ptx_coef > 0:
        return "texts of pretrain_data are not recorded"
    if step.record.values.log_kept_mass.size and follows_policy(config):
        return "what top_k, top_p and min_p exclude from the new policy is not recorded"
    return ""


def policy_objectives(step: ReplayedStep, reference: Path | None) -> dict[str, ReplayedLoss]:
    """Compare scores, rewards and advantages; return the objectives of actor and critic."""
    numbers = score_models(step, reference)
    inputs = Inputs(numbers, *estimate(step, numbers))
    return {
        "actor": PolicyReplay(step, step.policy, inputs, _not_recorded(step)),
        "critic": ValueObjective(step, step.critic, inputs),
    }
