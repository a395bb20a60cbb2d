"""The updates of reinforcement: the policy loss, the KL term, entropy, and a critic's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lightrft.config import TrainConfig
from lightrft.tools.audit.corrections import Borders, Pair, follows_policy
from lightrft.tools.audit.decisions import as_reinforcement
from lightrft.tools.audit.losses import (
    POLICY_LOSSES,
    Batch,
    Term,
    kl_term,
    normalizer,
    token_shares,
    value_term,
)
from lightrft.tools.audit.record import Array, Flags
from lightrft.tools.audit.replay import (
    NO_PASS,
    Numbers,
    Step,
    build_policy,
    check_ends,
    check_samples,
    estimate,
    policy_options,
    score_models,
    supervised_advantages,
    token_weights,
    with_rounding,
)
from lightrft.tools.audit.updates import Slopes, StageAudit, Update, Updates

# Rounding of a recorded score.
FLOAT32 = 2.0**-23


@dataclass(frozen=True, slots=True)
class Inputs:
    """Numbers that updates are computed from.

    Args:
        numbers: Before the first update.
        advantages: Of run and own.
        returns: [rows, seq] that a critic learns.
        error: Rounding of advantages and returns.
    """

    numbers: Numbers
    advantages: Pair
    returns: Array
    error: float


class PolicyUpdates(Updates):
    """Updates of an actor, and of any critic, on samples.

    Args:
        step, inputs: What is audited.
        is_configured: See `Updates`.
    """

    def __init__(self, step: Step, inputs: Inputs, *, is_configured: bool) -> None:
        self.inputs = inputs
        super().__init__(step, is_configured=is_configured)
        reason = _not_recorded(step)
        if reason:
            self._ended.setdefault("actor", reason)

    def _carry_out(self, update: Update) -> None:
        if self.step.policy is None:
            self._follow(update)
        else:
            super()._carry_out(update)

    def _slopes(self, update: Update) -> Slopes:
        is_critic = update.facts.model == "critic"
        return self._value_slopes(update) if is_critic else self._policy_slopes(update)

    @property
    def _mode(self) -> str:
        config = self.step.config
        return config.loss_agg_mode or POLICY_LOSSES[config.policy_loss_name].aggregation

    def _denominator(self, mask: Flags) -> float:
        config = self.step.config
        turns = config.max_turns if config.has_episodes else 1
        return normalizer(mask, self._mode, config.generate_max_len * turns)

    def _share(self, update: Update) -> Array:
        """[rows, seq], each token's part of a mean."""
        z = max(self._denominator(update.mask), 1e-300)
        return np.asarray(token_shares(update.mask, self._mode) / z)

    def _follow(self, update: Update) -> None:
        """Compares what needs no pass of the model: losses of the run's scores, and the rate."""
        found, facts, mask = self.step.found, update.facts, update.mask
        if update.new is None:
            found.skip(f"losses, {update.name}", "its scores are not recorded")
        else:
            seen = np.where(mask, update.new, 0.0)
            scores, error = Pair(seen, seen), np.where(mask, FLOAT32 * np.maximum(1, -seen), 0.0)
            if facts.model == "critic":
                self._value_term(update, scores, error)
            else:
                self._policy_terms(update, scores, error)
        found.skip(f"gradient norm, {update.name}", NO_PASS)
        if not facts.is_skipped:
            self._rate(update)

    def _policy_slopes(self, update: Update) -> Slopes:
        step, mask, by_entropy = self.step, update.mask, np.zeros(update.mask.shape)
        policy, share = step.policy, self._share(update)
        assert policy is not None  # else the run is followed
        policy.load(self._optimizers["actor"].weights)
        own, entropy = policy.score(step.rows.ids, mask)
        new = Pair(own, own if update.new is None else update.new)
        error = self._check_scores("logprobs", update, new, policy)
        terms = self._policy_terms(update, new, error)
        if step.config.entropy_coef > 0:
            by_entropy = -step.config.entropy_coef * share
            own_term, moved = Term(entropy, by_entropy), Term(error, by_entropy)
            self._check_loss("entropy", update, own_term.times(share), moved.times(share))
        slopes, noise = self._summed(terms)
        noises = [noise, self._unit * by_entropy]
        return self._gradients(update, policy, [slopes, by_entropy], noises)

    def _summed(self, terms: Sequence[tuple[Term, Term]]) -> tuple[Array, Array]:
        """The derivatives of all terms by scores, and their rounding."""
        slopes = np.sum([term.slope for term, _ in terms], axis=0)
        moved = np.sum([moved.slope for _, moved in terms], axis=0)
        return slopes, self._noise_of(slopes, moved)

    def _policy_terms(self, update: Update, new: Pair, error: Array) -> list[tuple[Term, Term]]:
        """The policy loss and the KL term of scores, each with how far it moves by rounding."""
        step, numbers, mask = self.step, self.inputs.numbers, update.mask
        config, share = step.config, self._share(update)
        weights = token_weights(step, numbers, self.inputs.advantages, mask, new)
        if weights is not None and update.weights is not None:
            self._check_weights(update, update.weights, weights, error)
        factors = share if weights is None else share * weights
        terms = [self._policy_term(update.micros, new, factors, error)]
        self._check_loss("policy", update, *terms[0])
        coef, reference = step.kl_coef, numbers.reference
        if config.use_kl_loss and coef > 0 and reference is not None:

            def kl_of(scores: Pair, borders: Borders) -> Term:
                kind, old = step.kl_estimator, numbers.old
                return kl_term(kind, scores, reference, old, mask, borders).times(share)

            # Scores and those of the reference are rounded alike.
            pair = with_rounding(kl_of, new, 2 * error, step.borders)
            self._check_loss("kl", update, *pair)
            terms.append((pair[0].times(coef), pair[1].times(coef)))
        return terms

    def _check_weights(self, update: Update, seen: Array, weights: Array, error: Array) -> None:
        """Weights by the new policy are rounded as its scores are, of a row as their sum."""
        name, scale = f"token weights, {update.name}", max(1.0, float(np.abs(weights).max()))
        floor = np.zeros(weights.shape)
        if follows_policy(self.step.config):
            floor = weights * error.sum(axis=1, keepdims=True)
        self.step.found.tokens(
            name, seen, weights, update.mask, "weights", scale=scale, floor=lambda: floor
        )

    def _policy_term(
        self, micros: list[list[int]], new: Pair, weights: Array, error: Array
    ) -> tuple[Term, Term]:
        """The policy loss, and how far it moves by the rounding of scores and advantages."""
        step, old, advantages = self.step, self.inputs.numbers.old, self.inputs.advantages.own
        loss, options = POLICY_LOSSES[step.config.policy_loss_name], policy_options(step.config)

        def of(scores: Pair, borders: Borders, shift: float = 0.0) -> Term:
            term = Term(np.zeros(weights.shape), np.zeros(weights.shape))
            for micro in micros:
                p, q, mask = scores.at(micro), old.at(micro), step.rows.mask[micro]
                batch = Batch(p, q, advantages[micro] + shift, mask, weights[micro], borders)
                part = loss.term(batch, options)
                term.value[micro], term.slope[micro] = part.value, part.slope
            return term

        term, moved = with_rounding(of, new, error, step.borders)
        shifted = of(new, Borders(step.borders.tolerance), self.inputs.error)
        return term, moved.plus(shifted.distance(term))

    def _value_slopes(self, update: Update) -> Slopes:
        step, critic, mask = self.step, self.step.critic, update.mask
        if critic is None:
            raise ValueError("the record has updates of a critic, but no critic")
        critic.load(self._optimizers["critic"].weights)
        (own,) = critic.score(step.rows.ids, mask)
        # Outside of responses a critic's values mean nothing.
        values = Pair(own, own if update.new is None else np.where(mask, update.new, 0.0))
        error = self._check_scores("values", update, values, critic)
        slopes, noise = self._summed([self._value_term(update, values, error)])
        return self._gradients(update, critic, [slopes], [noise])

    def _value_term(self, update: Update, values: Pair, error: Array) -> tuple[Term, Term]:
        """The value loss, and how far it moves by rounding."""
        step, old, clip = self.step, self.inputs.numbers.values, self.step.config.value_clip
        mask, share = update.mask, self._share(update)
        if old is None:
            raise ValueError("the record has updates of a critic, but no values")

        def value_of(scores: Pair, borders: Borders) -> Term:
            returns = self.inputs.returns
            return value_term(scores, old, returns, mask, clip=clip, borders=borders).times(share)

        # What is learned is rounded as the values are.
        pair = with_rounding(value_of, values, 2 * error + self.inputs.error, step.borders)
        self._check_loss("value", update, *pair)
        return pair


def _not_recorded(step: Step) -> str:
    """Why the actor's gradients depend on what is not recorded; "" if they do not."""
    config = step.config
    if config.policy_loss_name not in POLICY_LOSSES:
        return f"policy loss {config.policy_loss_name} is the caller's own"
    if config.pretrain_data is not None and config.ptx_coef > 0:
        return "texts of pretrain_data are not recorded"
    if step.record.values.log_kept_mass.size and follows_policy(config):
        return "what top_k, top_p and min_p exclude from the new policy is not recorded"
    return ""


def policy_audit(config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage; see `stage_named` of `lightrft.tools.audit.report`."""

    def updates(step: Step, is_configured: bool) -> Updates:
        numbers = score_models(step, reference)
        advantages, returns, error = estimate(step, numbers)
        inputs = Inputs(numbers, advantages, returns, error)
        return PolicyUpdates(step, inputs, is_configured=is_configured)

    return StageAudit(config, partial(build_policy, config), check_samples, updates)


def supervised_audit(config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage; see `stage_named` of `lightrft.tools.audit.report`."""

    def updates(step: Step, is_configured: bool) -> Updates:
        numbers = score_models(step, reference)
        check_ends(step)
        advantages, error = supervised_advantages(step, numbers)
        inputs = Inputs(numbers, advantages, advantages.own, error)
        return PolicyUpdates(step, inputs, is_configured=is_configured)

    config = as_reinforcement(config)
    return StageAudit(config, partial(build_policy, config), check_samples, updates)
