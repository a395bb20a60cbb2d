"""Recomputation of one step from raw samples and the states before, compared with the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.parts.learning import AlgorithmOptions
from lightrft.config.parts.rollout import DrawOptions
from lightrft.tools.audit.advantages import (
    ESTIMATORS,
    MIN_VARIANCE,
    TOKEN_ESTIMATORS,
    WHITENING,
    Scores,
    enlargement,
    gae,
    policy_lambds,
    returns,
    row_advantages,
    token_rewards,
    whitened,
)
from lightrft.tools.audit.corrections import Tokens, correction, high_entropy, parse
from lightrft.tools.audit.decisions import Decisions, kl_estimator
from lightrft.tools.audit.findings import Findings
from lightrft.tools.audit.losses import POLICY_LOSSES, kl_term
from lightrft.tools.audit.models import (
    FIRST,
    SCORE,
    SECOND,
    Policy,
    Scorer,
    Values,
    frozen_state,
    sees_media,
)
from lightrft.tools.audit.pairs import Borders, Pair, with_rounding
from lightrft.tools.audit.record import (
    COMPONENT,
    TURN_REWARDS,
    VERSIONS,
    Array,
    StepRecord,
    named,
    read_record,
    recorded_steps,
)
from lightrft.tools.audit.samples import Rows, build_rows, sampled_lengths, shaped_rewards
from lightrft.tools.audit.tolerances import MEAN_SHARES, NOISE_SAFETY, tolerances_of

ALL_LINEAR = "all-linear"
NO_PASS = "images and videos are not recorded, and without them no pass of the model"
ENGINES_OF_THE_MODEL = ("hf", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Per-token numbers before the first update: [rows, seq] pairs; None is "no such model".

    Args:
        old: Logprobs of the policy at the start of the step.
        sampling: Old logprobs under the sampling distribution.
        entropy: Entropies of the policy.
        reference, teacher: Logprobs of these models.
        values: Values of the critic.
    """

    old: Pair
    sampling: Pair
    entropy: Pair
    reference: Pair | None
    teacher: Pair | None
    values: Pair | None


@dataclass(slots=True)
class ReplayedStep:
    """Shared state of one audit.

    Args:
        record, config: Record and options of the step.
        results: Collector of the comparisons.
        rows: Rows built from the raw samples.
        policy: Plain model of the actor; None if its inputs are not all recorded.
        critic: Plain model of the critic, or None.
        states: Recorded weights and optimizer states before the step, by model.
        decided: Expected values at the start of the step.
        borders: Decisions at bounds.
        unit: Rounding of a score.
    """

    record: StepRecord
    config: TrainConfig
    results: Findings
    rows: Rows
    policy: Scorer | None
    critic: Values | None
    states: dict[str, dict[str, Tensor]]
    decided: Decisions
    borders: Borders = field(init=False)
    unit: float = field(init=False)

    def __post_init__(self) -> None:
        self.unit = self.results.tolerances["score"]
        self.borders = Borders(self.results.tolerances["weights"])

    @property
    def mask(self) -> Tensor:
        """Tokens that count: [rows, seq] bool."""
        return torch.from_numpy(self.rows.mask)

    def wide(self, flat: np.ndarray) -> Tensor:
        """Return a flat per-token array as [rows, seq] float64, 0 on padding."""
        return torch.from_numpy(self.rows.padded(flat)).double()

    def rounding(self, scores: Tensor, kind: str) -> Tensor:
        """Return the rounding of every score that this kind's mean distance allows."""
        share = MEAN_SHARES[kind] / MEAN_SHARES["logprobs"]
        return share * self.unit * scores.abs().clamp(min=1.0)

    @property
    def is_reinforced(self) -> bool:
        """True if an engine sampled the rows."""
        return self.record.facts.stage == "policy"

    @property
    def is_rounded(self) -> bool:
        """True if the run computes in bfloat16."""
        return self.record.facts.compute_dtype == "bfloat16"

    def noise(
        self, model: Scorer, state: Mapping[str, Tensor], exact: Sequence[Tensor]
    ) -> list[float]:
        """Return the mean distance per token caused by bfloat16; infinite for float32 runs."""
        mask = self.mask
        if not self.is_rounded or not mask.any():
            return [math.inf] * len(exact)
        rounded = model.in_bfloat16()
        rounded.load(state)
        pairs = zip(exact, rounded.score(self.rows.ids, mask), strict=True)
        return [mean_distance(Pair(*each), mask) for each in pairs]

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term."""
        expected = self.decided.kl_coef
        return self.record.facts.kl_coef if expected is None else expected

    @property
    def kl_estimator(self) -> str:
        """Estimator of the KL term."""
        return kl_estimator(self.config)

    @property
    def reward_kl_coef(self) -> float:
        """Weight of the KL term in the reward."""
        return 0.0 if self.config.use_kl_loss else self.kl_coef

    def trained_names(self, model: str) -> list[str]:
        """Return names of the trained weights: only the adapters if there are any, else all."""
        config = self.config
        if model != "actor" or not config.lora_rank:
            return list(named(self.states[model], "weight"))
        if self.policy is None:
            return [n for n in named(self.states[model], "weight") if n.endswith((FIRST, SECOND))]
        targets = config.target_modules
        head = [n for n in named(self.states[model], "weight") if n.endswith(f".{SCORE}.weight")]
        chosen = [
            layer
            for layer in self.policy.linear_layers()
            if ALL_LINEAR in targets or _is_meant(layer.partition(".")[2], targets)
        ]
        return head + [layer + factor for layer in chosen for factor in (FIRST, SECOND)]


# Plain model from a folder with config.json, the adapters' scale, and whether to round weights.
Builder = Callable[[Path, float, bool], Scorer]


def _is_meant(name: str, targets: Sequence[str]) -> bool:
    whole = name.removeprefix("model.")
    return any(f".{name}".endswith(f".{t}") or re.fullmatch(t, whole) for t in targets)


def open_step(
    record: StepRecord, config: TrainConfig, decided: Decisions, build: Builder
) -> ReplayedStep:
    """Build the shared state of an audit, with plain models.

    Args:
        record, config, decided: See `ReplayedStep`.
        build: Builder of the trained model.
    """
    facts, before = record.facts, record.folder / "before"
    rounds = facts.compute_dtype == "bfloat16"
    policy, critic = None, None
    states = {name: record.state("before", name) for name in facts.optimizers}
    if not sees_media(before / "actor"):
        policy = build(before / "actor", decided.lora_scale, rounds)
        critic = Values(before / "critic", rounds=rounds) if "critic" in states else None
    rows = build_rows(record.samples, config)
    findings = Findings(tolerances_of(facts.compute_dtype))
    return ReplayedStep(record, config, findings, rows, policy, critic, states, decided)


def build_policy(
    config: DrawOptions, _: Path | None, folder: Path, lora_scale: float, rounds: bool
) -> Policy:
    """Build the plain model of an actor."""
    temperature = config.temperature if config.temperature > 0 else 1.0
    return Policy(folder, temperature=temperature, lora_scale=lora_scale, rounds=rounds)


def check_rows(step: ReplayedStep) -> None:
    """Compare ids, masks, engine logprobs, compute dtype and scale of adapters."""
    findings, rows, values = step.results, step.rows, step.record.values
    findings.exact("token ids", rows.padded(values.token_ids).astype(np.int64), rows.ids)
    findings.exact("response mask", rows.padded(values.response_mask), rows.mask)
    if step.is_reinforced:
        rollout = rows.padded(values.rollout_logprobs)
        findings.tokens("rollout logprobs", rollout, rows.rollout_logprobs, rows.mask, "number")
    if step.config.bf16 is not None:
        findings.number("computes in bfloat16", step.is_rounded, step.config.bf16)
    scale = step.record.facts.lora_scale
    findings.number("scale of adapters", scale, step.decided.lora_scale)


def score_models(step: ReplayedStep, reference: Path | None) -> Numbers:
    """Recompute and compare logprobs, entropies and values of the states before."""
    config, rows, run, policy = step.config, step.rows, step.record.values, step.policy
    if policy is None:
        return _recorded_numbers(step)

    def paired(name: str, seen: NDArray[np.float32], exact: Tensor, noise: float) -> Pair:
        pair = Pair(exact, step.wide(seen))
        step.results.tokens(name, pair.run, exact, step.mask, "logprobs")
        if step.is_rounded and rows.mask.any():
            mean = mean_distance(pair, step.mask)
            step.results.add(f"{name} (mean distance)", None, None, mean, NOISE_SAFETY * noise)
        return pair

    def score(model: Scorer, state: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Return numbers per token, each with its mean distance by the run's dtype."""
        model.load(state)
        numbers = model.score(rows.ids, step.mask)
        return list(zip(numbers, step.noise(model, state, numbers), strict=True))

    (logprobs, noise), (entropy, noise_of_entropy) = score(
        policy, named(step.states["actor"], "weight")
    )
    if step.is_reinforced:
        _check_engine(step, logprobs)
    step.unit = min(step.unit, NOISE_SAFETY * noise)
    sampled = torch.from_numpy(rows.rollout_logprobs) if config.use_rollout_logprobs else logprobs
    old = paired("old logprobs", run.old_logprobs, sampled, noise)
    entropies = Pair(entropy, entropy)
    if run.entropy.size:
        entropies = paired("entropy", run.entropy, entropy, noise_of_entropy)
    sampling, ref, teacher, values = _sampling(step, old), None, None, None
    if run.ref_logprobs.size:
        state = frozen_state(reference or Path(str(config.pretrain)))
        ref = paired("reference logprobs", run.ref_logprobs, *score(policy, state)[0])
    step.results.number("has a teacher", run.teacher_logprobs.size > 0, config.teacher is not None)
    if run.teacher_logprobs.size and (folder := Path(str(config.teacher))).is_dir():
        model = build_policy(config, None, folder, 0.0, step.is_rounded)
        scored = score(model, frozen_state(folder))[0]
        teacher = paired("teacher logprobs", run.teacher_logprobs, *scored)
    elif run.teacher_logprobs.size:
        seen = step.wide(run.teacher_logprobs)
        step.results.skip("teacher logprobs", f"no model in {folder}; the run's are taken")
        teacher = Pair(seen, seen)
    if step.critic is not None and run.values.size:
        state = named(step.states["critic"], "weight")
        values = paired("values", run.values, *score(step.critic, state)[0])
    return Numbers(old, sampling, entropies, ref, teacher, values)


def _recorded_numbers(step: ReplayedStep) -> Numbers:
    """Return the run's numbers, where no forward pass can be repeated."""
    run, nothing = step.record.values, torch.zeros(step.rows.mask.shape, dtype=torch.float64)

    def taken(name: str, seen: NDArray[np.float32]) -> Pair | None:
        if not seen.size:
            return None
        step.results.skip(name, NO_PASS)
        wide = torch.where(step.mask, step.wide(seen), 0.0)
        return Pair(wide, wide)

    old = taken("old logprobs", run.old_logprobs) or Pair(nothing, nothing)
    _check_engine(step, old.run)
    return Numbers(
        old,
        _sampling(step, old),
        taken("entropy", run.entropy) or Pair(nothing, nothing),
        taken("reference logprobs", run.ref_logprobs),
        taken("teacher logprobs", run.teacher_logprobs),
        taken("values", run.values),
    )


def _sampling(step: ReplayedStep, old: Pair) -> Pair:
    """Return old logprobs under the sampling distribution."""
    if not step.record.values.log_kept_mass.size:
        return old
    mass = step.wide(step.record.values.log_kept_mass)
    step.results.skip("kept mass", "what top_k, top_p and min_p excluded is taken from the run")
    return old.map(lambda each: each - mass)


def _check_engine(step: ReplayedStep, exact: Tensor) -> None:
    """Compare the engine's logprobs with those of the weights that sampled each token.

    Weights of older versions come from earlier records, if they exist.
    """
    name, rows = "engine logprobs", step.rows
    if step.record.facts.engine not in ENGINES_OF_THE_MODEL:
        step.results.skip(name, f"the engine {step.record.facts.engine!r} computes no model")
    elif step.config.use_fire:
        step.results.skip(name, "tokens of several temperatures")
    elif not step.record.samples.is_untruncated.all():
        step.results.skip(name, "drawn with top_k, top_p or min_p")
    else:
        expected, is_known = _sampling_weights(step, exact)
        step.results.tokens(name, rows.rollout_logprobs, expected, step.mask & is_known, "engine")


def _sampling_weights(step: ReplayedStep, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs under the weights that sampled each token, and where these are known."""
    mask, current, policy = step.mask, step.record.facts.weights_version, step.policy
    versions = step.record.samples.facts.get(VERSIONS, np.zeros(0))
    if current < 0 or not versions.size or policy is None:
        return exact, mask
    of_token = step.wide(versions)
    expected, is_known = exact.clone(), of_token == current
    older = set(of_token[mask].int().tolist()) - {current}
    for version, record in _records_of(step.record, older):
        policy.load(named(record.state("before", "actor"), "weight"))
        where = of_token == version
        expected[where] = policy.score(step.rows.ids, mask)[0][where]
        is_known |= where
        older.remove(version)
    policy.load(named(step.states["actor"], "weight"))
    for version in sorted(older):
        num_tokens = int((mask & (of_token == version)).sum())
        step.results.skip(
            f"engine logprobs of version {version}", f"no record has the weights of {num_tokens}"
        )
    return expected, is_known


def _records_of(record: StepRecord, versions: Collection[int]) -> Iterator[tuple[int, StepRecord]]:
    """Yield earlier steps that began with weights of these versions, the newest first."""
    run, oldest = record.folder.parent.parent, min(versions, default=0)
    wanted = set(versions)
    for number in reversed([n for n in recorded_steps(run) if n < record.facts.step]):
        earlier = read_record(run, number)
        version = earlier.facts.weights_version
        if version in wanted:
            wanted.remove(version)
            yield version, earlier
        if version <= oldest:
            return


def estimate(step: ReplayedStep, numbers: Numbers) -> tuple[Pair, Tensor, float]:
    """Compute advantages, the returns that a critic learns, and the rounding of both."""
    config, rows, samples, run = step.config, step.rows, step.record.samples, step.record.values
    moments = step.decided.reward_moments or step.record.facts.reward_moments
    rewards, greedy, size = shaped_rewards(samples, rows.is_kept, config, moments)
    error = step.results.tolerances["sum"] * size
    step.results.tokens(
        "rewards",
        run.rewards[:, None],
        rewards[:, None],
        np.ones((len(rewards), 1), dtype=np.bool_),
        "number",
        scale=max(1.0, float(np.abs(rewards).max(initial=0))),
        floor=lambda: error,
    )
    seen, seen_returns = step.wide(run.advantages), step.wide(run.returns)
    name, mask = config.advantage_estimator, rows.mask
    if name not in ESTIMATORS:
        step.results.skip("advantages", f"of {name}; the run's are taken")
        return Pair(seen, seen), seen_returns, error
    if name not in TOKEN_ESTIMATORS:
        lengths = sampled_lengths(samples)
        components = {
            name.removeprefix(COMPONENT): values.astype(np.float64)
            for name, values in samples.facts.items()
            if name.startswith(COMPONENT)
        }
        scores = Scores(rewards, greedy, samples.group_ids, lengths, rows.is_kept, components)
        rewards = row_advantages(name, scores, config.advantage_args or {})
        error *= enlargement(rewards, scores)
    penalty, moved = _kl_penalty(step, numbers)
    error += moved
    shaped = token_rewards(rewards, mask, penalty, _paid_by_turn(step))
    if name == "gae" and numbers.values is not None:
        values = numbers.values.exact.numpy()
        advantages = gae(shaped, values, mask, config, policy_lambds(mask, config))
        target = np.where(mask, gae(shaped, values, mask, config) + values, 0.0)
        error += _row_sum(step.rounding(numbers.values.exact, "logprobs"), step.mask)
    else:
        advantages = target = returns(shaped, mask, config)
    learned = torch.from_numpy(target)
    _check_advantages(step, "returns", Pair(learned, seen_returns), error)
    if name in WHITENING or config.advantages_norm:
        # A run may take rounding errors of equal numbers for variance.
        is_rounding = np.ptp(advantages[mask]) <= error if mask.any() else True
        advantages, std = whitened(advantages, mask)
        error /= math.sqrt(MIN_VARIANCE) if is_rounding else std
    final = torch.from_numpy(advantages)
    if numbers.teacher is not None:
        # log p - log q of each token, without discount.
        final = final + config.teacher_coef * numbers.teacher.less(numbers.old, step.mask).exact
        rounding = step.rounding(numbers.old.exact, "logprobs")[step.mask]
        error += 2 * config.teacher_coef * max(rounding.tolist(), default=0.0)
    if config.advantage_clip > 0:
        final = final.clamp(-config.advantage_clip, config.advantage_clip)
    _check_advantages(step, "advantages", Pair(final, seen), error)
    return Pair(final, seen), learned, error


def _check_advantages(step: ReplayedStep, name: str, values: Pair, error: float) -> None:
    scale = float(np.abs(np.asarray(values.exact)).max(initial=1e-6))
    step.results.tokens(
        name,
        values.run,
        values.exact,
        step.rows.mask,
        "advantages",
        scale=scale,
        floor=lambda: error,
    )


def _paid_by_turn(step: ReplayedStep) -> Array:
    """Return the parts of rewards that are paid at the end of turns: [rows, seq]."""
    config, facts = step.config, step.record.samples.facts
    is_whole = config.reward_running_norm or config.reward_clip > 0
    is_placed = config.advantage_estimator in TOKEN_ESTIMATORS and not is_whole
    if not is_placed or TURN_REWARDS not in facts:
        return np.zeros(step.rows.mask.shape)
    return step.rows.padded(facts[TURN_REWARDS])


def _kl_penalty(step: ReplayedStep, numbers: Numbers) -> tuple[Array, float]:
    """Return the KL penalty of each token's reward, and the rounding of a row's sum."""
    mask, reference, old = step.mask, numbers.reference, numbers.old
    if step.reward_kl_coef <= 0 or reference is None:
        return np.zeros(mask.shape), 0.0

    def term_of(scores: Pair, borders: Borders) -> Tensor:
        return kl_term(step.kl_estimator, scores, reference, old, mask, borders)

    # Scores of policy and reference have the same rounding error.
    error = 2 * step.rounding(old.exact, "logprobs")
    exact, moved = with_rounding(term_of, old, (error, -error), step.borders)
    penalty = step.reward_kl_coef * exact.value
    return penalty.numpy(), step.reward_kl_coef * _row_sum(moved.value, mask)


def mean_distance(values: Pair, mask: Tensor) -> float:
    """Return the mean distance per token, relative to 1 or to the value if larger."""
    distance = (values.run - values.exact).abs() / values.exact.abs().clamp(min=1.0)
    return float(distance[mask].mean())


def _row_sum(errors: Tensor, mask: Tensor) -> float:
    """Return the largest rounding of a row's sum, for errors with independent signs."""
    return 3 * float((torch.where(mask, errors, 0.0) ** 2).sum(dim=1).sqrt().max())


def token_weights(
    step: ReplayedStep, numbers: Numbers, advantages: Pair, mask: Tensor, new: Pair
) -> Tensor | None:
    """Return the factor of each token's loss in an optimizer batch; None is 1.

    Args:
        step, numbers, advantages: Step under audit, its numbers and advantages.
        mask: Tokens of the batch: [rows, seq] bool.
        new: Logprobs that the update differentiates.
    """
    terms = parse(step.config)
    weights: Tensor | None = None
    if step.config.high_entropy_token_ratio > 0:
        weights = high_entropy(numbers.entropy, mask, step.borders, step.config).double()
    if terms:
        rollout = torch.from_numpy(step.rows.rollout_logprobs)
        tokens = Tokens(numbers.sampling, rollout, advantages, mask, new)
        factors = correction(terms, tokens, step.borders)
        weights = factors if weights is None else weights * factors
    return weights


def policy_options(config: AlgorithmOptions) -> dict[str, float]:
    """Return the policy loss's hyper-parameters: paper, then common options, then its args."""
    options = dict(POLICY_LOSSES[config.policy_loss_name].defaults)
    common = {
        "clip_low": (config.eps_clip_low, config.eps_clip),
        "clip_high": (config.eps_clip_high, config.eps_clip),
        "dual_clip": (config.dual_clip,),
    }
    for name, values in common.items():
        choices = [value for value in values if value is not None]
        if choices and name in options:
            options[name] = choices[0]
    return options | {name: float(value) for name, value in (config.policy_loss_args or {}).items()}
