"""Objectives of reinforcement learning: policy loss, KL term, entropy, and a critic's loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.options import Arguments
from lightrft.config.parts.learning import AlgorithmOptions
from lightrft.tools.audit.corrections import (
    correction,
    follows_policy,
    high_entropy,
    parse,
)
from lightrft.tools.audit.decisions import kl_estimator
from lightrft.tools.audit.losses import (
    POLICY_LOSSES,
    Batch,
    kl_term,
    normalizer,
    token_shares,
    value_term,
)
from lightrft.tools.audit.pairs import Draw, Pair
from lightrft.tools.audit.record import WEIGHTS
from lightrft.tools.audit.replay import DrawnInputs, ReplayedStep, estimate, score_models
from lightrft.tools.audit.updates import Objective, Objectives, Terms, Update, with_options


class PolicyObjectives:
    """Losses of actor and critic, which are means over tokens.

    Args:
        step: Step under audit.
        drawn: Inputs of the updates.
        draw: Signs of rounding errors.
    """

    def __init__(self, step: ReplayedStep, drawn: DrawnInputs, draw: Draw) -> None:
        self.step, self.drawn, self.draw, config = step, drawn, draw, step.config
        _, aggregation = POLICY_LOSSES.get(config.policy_loss_name, (None, ""))
        self._mode = config.loss_agg_mode or aggregation

    def denominator(self, mask: Tensor) -> float:
        """Return Z of the loss aggregation."""
        config = self.step.config
        turns = config.max_turns if config.has_episodes else 1
        return normalizer(mask, self._mode, config.generate_max_len * turns)

    def share(self, mask: Tensor) -> Tensor:
        """Return each token's share of the mean, with importance weights: [rows, seq]."""
        shares = token_shares(mask, self._mode) / max(self.denominator(mask), 1e-300)
        if self.step.config.prompt_importance:
            weights = torch.from_numpy(self.step.record.samples.facts[WEIGHTS]).double()
            shares = shares * weights[:, None]
        return shares

    def policy(self, update: Update, outputs: Sequence[Pair]) -> Terms:
        """Compare the weights of tokens; return the loss of the actor on samples."""
        config, share, new, numbers = (
            self.step.config,
            self.share(update.mask),
            outputs[0],
            self.drawn.numbers,
        )
        # Weights of the new policy carry the rounding of its scores.
        weights = self._weights(update.mask, new.map(Tensor.detach))
        if update.weights is not None:
            scale = max(1.0, float(weights.abs().max()))
            name = f"token weights, {update.name}"
            pair = Pair(weights, update.weights)
            self.step.results.tokens(name, pair, update.mask, "weights", scale=scale)
        # A token that is left out stays out in every draw: its whole loss is no rounding.
        weights = self.draw.repeated(weights)
        parts = {"policy": (1.0, self._policy_loss(update.micros, new) * share * weights)}
        coef, reference = self.step.kl_coef, numbers.get("reference")
        if config.use_kl_loss and coef > 0 and reference is not None:
            name, old = kl_estimator(config), numbers["old"]
            kl = kl_term(name, new, reference, old, update.mask, self.draw)
            parts["kl"] = coef, share * kl
        if config.entropy_coef > 0 and len(outputs) > 1:
            parts["entropy"] = -config.entropy_coef, share * outputs[1].exact
        return parts

    def _policy_loss(self, micros: list[list[int]], new: Pair) -> Tensor:
        """Return the policy loss of each token, 0 outside the micro batches: [rows, seq]."""
        config, masks = self.step.config, self.step.mask
        old, advantages = self.drawn.numbers["old"], self.drawn.advantages.exact
        loss, _ = POLICY_LOSSES[config.policy_loss_name]
        function = with_options(loss, policy_options(config))
        values = torch.zeros_like(advantages)
        for rows in micros:
            p, q, mask = new.at(rows), old.at(rows), masks[rows]
            batch = Batch(p, q, advantages[rows], mask, self.draw)
            values[rows] = torch.where(mask, function(batch), 0.0)
        return values

    def _weights(self, mask: Tensor, new: Pair) -> Tensor:
        """Return the factor of each token's loss in an optimizer batch."""
        config, terms, numbers = self.step.config, parse(self.step.config), self.drawn.numbers
        weights = torch.ones_like(new.exact)
        if config.high_entropy_token_ratio > 0:
            weights = high_entropy(numbers["entropy"], mask, self.draw, config).double()
        if terms:
            rollout = self.step.rows.rollout_logprobs
            policies = {
                "old": numbers["sampling"],
                "engine": Pair(rollout, rollout),
                "new": new,
            }
            weights = weights * correction(terms, policies, self.drawn.advantages, mask, self.draw)
        return weights

    def value(self, update: Update, outputs: Sequence[Pair]) -> Terms:
        """Return the loss of a critic."""
        old, returns = self.drawn.numbers.get("values"), self.drawn.returns
        if old is None:
            raise ValueError("the record has updates of a critic, but no values")
        clip, mask = self.step.config.value_clip, update.mask
        loss = value_term(outputs[0], old, returns, mask, clip=clip, draw=self.draw)
        return {"value": (1.0, self.share(mask) * loss)}


def policy_options(config: AlgorithmOptions) -> Arguments:
    """Return the policy loss's hyper-parameters: common options, then its arguments."""
    bounds = config.eps_clip_low, config.eps_clip_high
    low, high = (config.eps_clip if bound is None else bound for bound in bounds)
    common = {"clip_low": low, "clip_high": high, "dual_clip": config.dual_clip}
    known = {name: value for name, value in common.items() if value is not None}
    return known | dict(config.policy_loss_args or {})


def _not_recorded(config: TrainConfig, *, is_truncated: bool) -> str:
    """Return which input of the actor's gradients is not recorded; "" if none."""
    if config.policy_loss_name not in POLICY_LOSSES:
        return f"policy loss {config.policy_loss_name} is the caller's own"
    if config.pretrain_data is not None and config.ptx_coef > 0:
        return "texts of pretrain_data are not recorded"
    if is_truncated and follows_policy(config):
        return "what top_k, top_p and min_p exclude from the new policy is not recorded"
    return ""


def policy_objectives(step: ReplayedStep, reference: Path | None) -> Objectives:
    """Compare scores; return the objectives of actor and critic in a draw."""
    numbers = score_models(step, reference)
    ended = _not_recorded(step.config, is_truncated=step.record.values.log_kept_mass.size > 0)

    def objectives(draw: Draw) -> dict[str, Objective]:
        losses = PolicyObjectives(step, estimate(step, numbers, draw), draw)
        z = losses.denominator
        return {
            "actor": Objective(step.policy, "logprobs", z, losses.policy, ended),
            "critic": Objective(step.critic, "values", z, losses.value),
        }

    return objectives
