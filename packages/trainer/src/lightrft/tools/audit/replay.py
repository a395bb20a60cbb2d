"""The chain of one step: recomputed from raw samples and the states before, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.tools.audit.advantages import (
    ESTIMATORS,
    MIN_VARIANCE,
    TOKEN_ESTIMATORS,
    WHITENING,
    Scores,
    enlargement,
    gae,
    returns,
    row_advantages,
    token_rewards,
    whitened,
)
from lightrft.tools.audit.corrections import (
    Borders,
    Pair,
    Tokens,
    correction,
    high_entropy,
    options_of,
    parse,
)
from lightrft.tools.audit.findings import Findings
from lightrft.tools.audit.losses import POLICY_LOSSES, Term, kl_term
from lightrft.tools.audit.models import Layers, Policy, Values, reference_state
from lightrft.tools.audit.record import Array, Flags, StepRecord
from lightrft.tools.audit.samples import Rows, build_rows, sampled_lengths, shaped_rewards
from lightrft.tools.audit.tolerances import MEAN_SHARES, tolerances_of

ENGINES_OF_THE_MODEL = ("hf", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Per-token numbers before the first update: [rows, seq] pairs; None is "no such model".

    Args:
        old: Logprobs of the policy at the start of the step.
        sampling: The same under the distribution that was sampled from.
        entropy, reference, values: As named.
    """

    old: Pair
    sampling: Pair
    entropy: Pair
    reference: Pair | None
    values: Pair | None


@dataclass(slots=True)
class Step:
    """Everything that the stages of one audit share.

    Args:
        record, config: What is audited.
        found: Receives the comparisons.
        rows: From the raw samples.
        policy: The actor's plain model.
        critic: Likewise, or None.
        states: Recorded weights and optimizer states before the step, by model.
        borders: Decides at bounds.
    """

    record: StepRecord
    config: TrainConfig
    found: Findings
    rows: Rows
    policy: Policy
    critic: Values | None
    states: dict[str, dict[str, Tensor]]
    borders: Borders = field(init=False)

    def __post_init__(self) -> None:
        self.borders = Borders(self.found.tolerances["weights"])

    def rounding(self, scores: Array, kind: str) -> Array:
        """Rounding of every score, as a mean distance of this kind may be."""
        share = MEAN_SHARES[kind] / MEAN_SHARES["logprobs"]
        unit = share * self.found.tolerances["score"]
        return np.asarray(unit * np.maximum(1.0, np.abs(scores)))

    def weights(self, model: str) -> dict[str, Tensor]:
        """Weights of a model before the step."""
        return weights_of(self.states[model])

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference model."""
        return self.record.values.ref_logprobs.size > 0

    @property
    def reward_kl_coef(self) -> float:
        """Weight of the KL term in the reward."""
        return 0.0 if self.config.use_kl_loss else self.record.facts.kl_coef


def weights_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries `weight/NAME`, by name."""
    return {n.partition("/")[2]: v for n, v in state.items() if n.startswith("weight/")}


def open_step(record: StepRecord, config: TrainConfig) -> Step:
    """Loads the states before the step into plain models."""
    facts, before = record.facts, record.folder / "before"
    rounds = facts.compute_dtype == "bfloat16"
    policy = Policy(before / "actor", Layers("model.", facts.lora_scale), rounds=rounds)
    states = {name: record.state("before", name) for name in facts.optimizers}
    critic = Values(before / "critic", rounds=rounds) if "critic" in states else None
    rows = build_rows(record.samples, config)
    found = Findings(tolerances_of(facts.compute_dtype))
    return Step(record, config, found, rows, policy, critic, states)


def check_samples(step: Step) -> None:
    """Ids, masks, the engine's logprobs, and which rows are trained on how often."""
    found, rows, values = step.found, step.rows, step.record.values
    found.exact("token ids", rows.padded(values.token_ids).astype(np.int64), rows.ids)
    found.exact("response mask", rows.padded(values.response_mask), rows.mask)
    rollout = rows.padded(values.rollout_logprobs)
    found.tokens("rollout logprobs", rollout, rows.rollout_logprobs, rows.mask, "number")
    by_model: dict[str, list[int]] = {}
    for update in step.record.facts.updates:
        ids = [i for micro in update.micro_batches for i in micro]
        by_model[update.model] = by_model.get(update.model, []) + ids
    wanted = np.repeat(np.sort(step.record.samples.sample_ids), step.config.max_epochs)
    for model, ids in by_model.items():
        found.exact(f"rows that train the {model}", np.sort(np.array(ids)), wanted)


def score_models(step: Step, reference: Path | None) -> Numbers:
    """Old and reference logprobs, entropies and values of the states before."""
    config, rows, found, run = step.config, step.rows, step.found, step.record.values
    temperature = config.temperature if config.temperature > 0 else 1.0
    step.policy.load(step.weights("actor"))
    own, entropy = step.policy.score(rows.ids, rows.mask, temperature)
    _check_engine(step, own)
    if config.use_rollout_logprobs:
        own = rows.rollout_logprobs
    old = Pair(own, rows.padded(run.old_logprobs))
    found.tokens("old logprobs", old.run, old.own, rows.mask, "logprobs")
    entropies = Pair(entropy, rows.padded(run.entropy) if run.entropy.size else entropy)
    if run.entropy.size:
        found.tokens("entropy", entropies.run, entropy, rows.mask, "logprobs")
    mass = rows.padded(run.log_kept_mass) if run.log_kept_mass.size else np.zeros(rows.ids.shape)
    if run.log_kept_mass.size:
        found.skip("kept mass", "what top_k and top_p excluded is taken from the run")
    ref = values = None
    if step.uses_reference:
        folder = reference or Path(str(config.pretrain))
        rounds = step.record.facts.compute_dtype == "bfloat16"
        model = Policy(step.record.folder / "before" / "actor", Layers(""), rounds=rounds)
        model.load(reference_state(folder))
        own, _ = model.score(rows.ids, rows.mask, temperature)
        ref = Pair(own, rows.padded(run.ref_logprobs))
        found.tokens("reference logprobs", ref.run, ref.own, rows.mask, "logprobs")
    if step.critic is not None and run.values.size:
        step.critic.load(step.weights("critic"))
        values = Pair(step.critic.score(rows.ids, rows.mask), rows.padded(run.values))
        found.tokens("values", values.run, values.own, rows.mask, "logprobs")
    return Numbers(old, Pair(old.own - mass, old.run - mass), entropies, ref, values)


def _check_engine(step: Step, own: Array) -> None:
    """The engine sampled from the weights before the step, and not from older ones."""
    config, name = step.config, "engine logprobs"
    if step.record.facts.engine not in ENGINES_OF_THE_MODEL:
        step.found.skip(name, f"the engine {step.record.facts.engine!r} computes no model")
    elif config.partial_rollout or config.use_fire:
        step.found.skip(name, "tokens of several weights or temperatures")
    elif not step.record.samples.is_untruncated.all():
        step.found.skip(name, "drawn with top_k or top_p")
    else:
        rows = step.rows
        step.found.tokens(name, rows.rollout_logprobs, own, rows.mask, "engine")


def estimate(step: Step, numbers: Numbers) -> tuple[Pair, Array, float]:
    """Advantages (of run and own), the returns that a critic learns, and the rounding of both."""
    config, rows, samples, run = step.config, step.rows, step.record.samples, step.record.values
    rewards, greedy, size = shaped_rewards(samples, rows.is_kept, config, step.record.facts)
    error = step.found.tolerances["sum"] * size
    everywhere = np.ones(len(rewards), dtype=np.bool_)
    step.found.tokens(
        "rewards",
        run.rewards[:, None],
        rewards[:, None],
        everywhere[:, None],
        "number",
        scale=max(1.0, float(np.abs(rewards).max(initial=0))),
        floor=lambda: error,
    )
    seen, seen_returns = (rows.padded(each) for each in (run.advantages, run.returns))
    name, mask = config.advantage_estimator, rows.mask
    if name not in ESTIMATORS:
        step.found.skip("advantages", f"of {name}; the run's are taken")
        return Pair(seen, seen), seen_returns, error
    if name not in TOKEN_ESTIMATORS:
        lengths = sampled_lengths(samples)
        scores = Scores(rewards, greedy, samples.group_ids, lengths, rows.is_kept)
        rewards = row_advantages(name, scores, options_of(config.advantage_args))
        error *= enlargement(rewards, scores)
    penalty, moved = _kl_penalty(step, numbers)
    error += moved
    shaped = token_rewards(rewards, mask, penalty)
    if name == "gae" and numbers.values is not None:
        advantages = gae(shaped, numbers.values.own, mask, config)
        target = np.where(mask, advantages + numbers.values.own, 0.0)
        error += _row_sum(step.rounding(numbers.values.own, "logprobs"), mask)
    else:
        advantages = target = returns(shaped, mask, config)
    _check_advantages(step, "returns", Pair(target, seen_returns), error)
    if name in WHITENING or config.advantages_norm:
        # A run may take for a variance what rounding left of equal numbers.
        is_rounding = np.ptp(advantages[mask]) <= error if mask.any() else True
        advantages, std = whitened(advantages, mask)
        error /= math.sqrt(MIN_VARIANCE) if is_rounding else std
    if config.advantage_clip > 0:
        advantages = np.clip(advantages, -config.advantage_clip, config.advantage_clip)
    _check_advantages(step, "advantages", Pair(advantages, seen), error)
    return Pair(advantages, seen), target, error


def _check_advantages(step: Step, name: str, values: Pair, error: float) -> None:
    scale = float(np.abs(values.own).max(initial=1e-6))
    step.found.tokens(
        name,
        values.run,
        values.own,
        step.rows.mask,
        "advantages",
        scale=scale,
        floor=lambda: error,
    )


def _kl_penalty(step: Step, numbers: Numbers) -> tuple[Array, float]:
    """What the KL term takes from each token's reward, and the rounding of a row's sum of it."""
    config, mask = step.config, step.rows.mask
    if step.reward_kl_coef <= 0 or numbers.reference is None:
        return np.zeros(mask.shape), 0.0
    reference, old = numbers.reference, numbers.old

    def term_of(scores: Pair, borders: Borders) -> Term:
        return kl_term(config.kl_estimator, scores, reference, old, mask, borders)

    # Scores and those of the reference are rounded alike.
    term, moved = with_rounding(term_of, old, 2 * step.rounding(old.own, "logprobs"), step.borders)
    return step.reward_kl_coef * term.value, step.reward_kl_coef * _row_sum(moved.value, mask)


def _row_sum(errors: Array, mask: Flags) -> float:
    """Rounding of the row with the most, of errors whose signs are independent."""
    return 3 * float(np.sqrt((np.where(mask, errors, 0.0) ** 2).sum(axis=1)).max(initial=0.0))


def with_rounding(
    term_of: Callable[[Pair, Borders], Term], scores: Pair, error: Array, borders: Borders
) -> tuple[Term, Term]:
    """A term, and how far its values and slopes move if every score moves by `error`."""
    term = term_of(scores, borders)
    near = [
        term_of(Pair(scores.own + e, scores.run + e), Borders(borders.tolerance))
        for e in (error, -error)
    ]
    value, slope = (
        np.maximum(*(np.abs(getattr(each, name) - getattr(term, name)) for each in near))
        for name in ("value", "slope")
    )
    return term, Term(value, slope)


def token_weights(
    step: Step, numbers: Numbers, advantages: Pair, batch: Sequence[int]
) -> Array | None:
    """What the loss of every token of an optimizer batch is multiplied with; None is 1."""
    mask = np.zeros(step.rows.mask.shape, dtype=np.bool_)
    mask[batch] = step.rows.mask[batch]
    terms = parse(step.config)
    found: Array | None = None
    if step.config.high_entropy_token_ratio > 0:
        kept = high_entropy(numbers.entropy, mask, step.borders, step.config)
        found = np.where(kept, 1.0, 0.0)
    if terms:
        tokens = Tokens(numbers.sampling, step.rows.rollout_logprobs, advantages, mask)
        factors = correction(terms, tokens, step.borders)
        found = factors if found is None else found * factors
    return found


def policy_options(config: TrainConfig) -> dict[str, float | None]:
    """Hyper-parameters of the policy loss: of its paper, of common options, its own."""
    found = dict(POLICY_LOSSES[config.policy_loss_name].defaults)
    common = {
        "clip_low": (config.eps_clip_low, config.eps_clip),
        "clip_high": (config.eps_clip_high, config.eps_clip),
        "dual_clip": (config.dual_clip,),
    }
    for name, values in common.items():
        given = [value for value in values if value is not None]
        if given and name in found:
            found[name] = given[0]
    for name, value in (config.policy_loss_args or {}).items():
        found[name] = float(value)
    return found


def relative_norm(run: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[float, float]:
    """2-norms of the difference and of `own`, over all names."""
    difference = sum(float(((run[n].double() - own[n]) ** 2).sum()) for n in own)
    size = sum(float((own[n] ** 2).sum()) for n in own)
    return float(np.sqrt(difference)), float(np.sqrt(size))


def as_double(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in float64."""
    return {name: value.to(torch.float64) for name, value in state.items()}
