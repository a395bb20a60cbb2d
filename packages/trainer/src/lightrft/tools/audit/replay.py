"""Recomputation of one step from raw samples and the states before, compared with the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.parts.rollout import DrawOptions
from lightrft.tools.audit.advantages import (
    ESTIMATORS,
    TOKEN_ESTIMATORS,
    WHITENING,
    Scores,
    gae,
    policy_lambds,
    row_advantages,
    token_rewards,
    whitened,
)
from lightrft.tools.audit.decisions import Decisions, kl_estimator
from lightrft.tools.audit.findings import Findings
from lightrft.tools.audit.losses import kl_term
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
from lightrft.tools.audit.pairs import Draw, Pair
from lightrft.tools.audit.record import (
    COMPONENT,
    TURN_REWARDS,
    VERSIONS,
    StepRecord,
    UpdateFacts,
    named,
    read_record,
    recorded_steps,
)
from lightrft.tools.audit.samples import (
    Rows,
    build_rows,
    kept_ids,
    routes,
    sampled_rows,
    shaped_rewards,
)
from lightrft.tools.audit.tolerances import MEAN_SHARES, NOISE_SAFETY, tolerances_of

ALL_LINEAR = "all-linear"
NO_PASS = "images and videos are not recorded, and without them no pass of the model"
ENGINES_OF_THE_MODEL = ("hf", "vllm", "sglang")
# Version of tokens whose context has the experts of newer weights.
_REPLACED = -2


# Per-token numbers before the first update: [rows, seq] pairs. "old" are logprobs of the policy,
# "sampling" those under the sampling distribution, "entropy" its entropies; "reference", "teacher"
# and "values" of a critic are missing without such a model.
Numbers = Mapping[str, Pair]


@dataclass(frozen=True, slots=True)
class DrawnInputs:
    """Inputs of the updates, with the errors of a draw.

    Args:
        numbers: Per-token numbers before the first update.
        advantages: Advantages of the run and recomputed ones.
        returns: Targets of a critic: [rows, seq].
    """

    numbers: Numbers
    advantages: Pair
    returns: Tensor


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
    unit: float = field(init=False)

    def __post_init__(self) -> None:
        self.unit = self.results.tolerances["score"]

    @property
    def mask(self) -> Tensor:
        """Tokens that count: [rows, seq] bool."""
        return self.rows.mask

    def micro_rows(self, update: UpdateFacts) -> list[list[int]]:
        """Return the rows of each micro batch of an update."""
        row_of = {int(i): row for row, i in enumerate(self.record.samples.sample_ids)}
        return [[row_of[i] for i in micro] for micro in update.micro_batches]

    def rounding(self, scores: Tensor, kind: str = "logprobs") -> Tensor:
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

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term."""
        expected = self.decided.kl_coef
        return self.record.facts.kl_coef if expected is None else expected

    def trained_names(self, model: str) -> list[str]:
        """Return names of the trained weights: only the adapters if there are any, else all."""
        config, names = self.config, list(named(self.states[model], "weight"))
        if model != "actor" or not config.lora_rank:
            return names
        if self.policy is None:
            return [n for n in names if n.endswith((FIRST, SECOND))]
        targets = config.target_modules
        chosen = [
            layer
            for layer in self.policy.linear_layers()
            if ALL_LINEAR in targets or _is_meant(layer.partition(".")[2], targets)
        ]
        head = [n for n in names if n.split(".")[-2] == SCORE]
        return head + [layer + factor for layer in chosen for factor in (FIRST, SECOND)]


# Numbers per token, with their mean distance by the run's dtype.
Scored = tuple[Tensor, float]
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
    if isinstance(policy, Policy):
        if config.truncated_logprobs == "kept":
            policy.renormalise(kept_ids(record.samples), rows.lengths.tolist())
        if experts := routes(record.samples):
            policy.replay(experts)
    findings = Findings(tolerances_of(facts.compute_dtype))
    return ReplayedStep(record, config, findings, rows, policy, critic, states, decided)


def build_policy(
    config: DrawOptions, _: Path | None, folder: Path, lora_scale: float, rounds: bool
) -> Policy:
    """Build the plain model of an actor."""
    temperature = config.temperature if config.temperature > 0 else 1.0
    return Policy(folder, temperature=temperature, lora_scale=lora_scale, rounds=rounds)


def score_models(step: ReplayedStep, reference: Path | None) -> Numbers:
    """Recompute and compare logprobs, entropies and values of the states before.

    Where no forward pass can be repeated, the run's numbers are taken.
    """
    config, run, policy = step.config, step.record.values, step.policy
    numbers = _score_policy(step)
    folder, teacher = Path(str(config.teacher)), None
    has_teacher = run.teacher_logprobs.size > 0
    step.results.number("has a teacher", has_teacher, config.teacher is not None)
    if policy is not None and has_teacher and folder.is_dir():
        teacher = build_policy(config, None, folder, 0.0, step.is_rounded)
    why = NO_PASS if policy is None else f"no model in {folder}; the run's are taken"
    pretrain = reference or Path(str(config.pretrain))
    for key, name, seen, model, source, reason in (
        ("reference", "reference logprobs", run.ref_logprobs, policy, pretrain, NO_PASS),
        ("teacher", "teacher logprobs", run.teacher_logprobs, teacher, folder, why),
        ("values", "values", run.values, step.critic, "critic", NO_PASS),
    ):
        if seen.size:
            numbers[key] = _compared(step, name, seen, _score(step, model, source)[0], reason)
    return numbers


def _score_policy(step: ReplayedStep) -> dict[str, Pair]:
    """Return old and sampling logprobs and entropies, and compare those of the engine."""
    run = step.record.values
    nothing = torch.zeros_like(step.rows.rollout_logprobs)
    old = entropy = Pair(nothing, nothing)
    logprobs, entropies = _score(step, step.policy, "actor")
    if logprobs is not None and entropies is not None:
        entropy = Pair(entropies[0], entropies[0])
        _check_engine(step, logprobs[0])
        step.unit = min(step.unit, NOISE_SAFETY * logprobs[1])
        if step.config.use_rollout_logprobs:
            logprobs = step.rows.rollout_logprobs, logprobs[1]
    # A step in which no token counts is not scored.
    if run.old_logprobs.size or (logprobs is not None and step.mask.any()):
        old = _compared(step, "old logprobs", run.old_logprobs, logprobs)
    if logprobs is None:
        _check_engine(step, old.run)
    if run.entropy.size:
        entropy = _compared(step, "entropy", run.entropy, entropies)
    sampling = old
    if run.log_kept_mass.size:
        mass = step.rows.padded(run.log_kept_mass)
        sampling = old.map(lambda each: each - mass)
        step.results.skip("kept mass", "what top_k, top_p and min_p excluded is taken from the run")
    return {"old": old, "sampling": sampling, "entropy": entropy}


def _score(step: ReplayedStep, model: Scorer | None, source: Path | str) -> list[Scored | None]:
    """Return numbers per token, each with its mean distance; infinite for float32 runs.

    Args:
        step: Step under audit.
        model: Plain model; None if its forward pass cannot be repeated.
        source: Name of a trained model, or the folder of a frozen one.
    """
    if model is None:
        return [None, None]
    state = (
        frozen_state(source) if isinstance(source, Path) else named(step.states[source], "weight")
    )
    model.load(state)
    numbers, mask = model.score(step.rows.ids, step.mask), step.mask
    if not step.is_rounded or not mask.any():
        return [(each, math.inf) for each in numbers]
    rounded = model.in_bfloat16()
    rounded.load(state)
    pairs = map(Pair, numbers, rounded.score(step.rows.ids, mask))
    return [(each.exact, mean_distance(each, mask)) for each in pairs]


def _compared(
    step: ReplayedStep, name: str, flat: np.ndarray, scored: Scored | None, why: str = NO_PASS
) -> Pair:
    """Compare numbers of the run with recomputed ones; without these, take the run's."""
    seen, mask = step.rows.padded(flat), step.mask
    if scored is None:
        step.results.skip(name, why)
        inside = torch.where(mask, seen, 0.0)
        return Pair(inside, inside)
    pair = Pair(scored[0], seen)
    step.results.tokens(name, pair, mask, "logprobs")
    if step.is_rounded and mask.any():
        mean = mean_distance(pair, mask)
        step.results.add(f"{name} (mean distance)", None, None, mean, NOISE_SAFETY * scored[1])
    return pair


def _check_engine(step: ReplayedStep, exact: Tensor) -> None:
    """Compare the engine's logprobs with those of the weights that sampled each token.

    Weights of older versions come from earlier records, if they exist.
    """
    name, rows, engine = "engine logprobs", step.rows, step.record.facts.engine
    if not step.is_reinforced:
        return
    if engine not in ENGINES_OF_THE_MODEL:
        step.results.skip(name, f"the engine {engine!r} computes no model")
    elif step.config.use_fire:
        step.results.skip(name, "tokens of several temperatures")
    elif not step.record.samples.is_untruncated.all() and not _knows_kept(step):
        step.results.skip(name, "drawn with top_k, top_p or min_p")
    else:
        expected, is_known = _sampling_weights(step, exact)
        seen = rows.rollout_logprobs.masked_fill(step.mask & ~is_known, 0.0)
        step.results.tokens(name, Pair(expected, seen), step.mask & is_known, "engine")


def _knows_kept(step: ReplayedStep) -> bool:
    """Return whether the kept ids of all trained tokens are recorded, and logprobs over them."""
    kept = step.policy.kept if isinstance(step.policy, Policy) else {}
    rows = step.mask.any(dim=1).nonzero().flatten().tolist()
    counts = step.mask.sum(dim=1)
    return all(sum(len(ids) > 0 for ids in kept.get(row, ())) >= counts[row] for row in rows)


def _sampling_weights(step: ReplayedStep, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs under the weights that sampled each token, and where these are known."""
    facts, mask, policy = step.record.facts, step.mask, step.policy
    run, current = step.record.folder.parent.parent, facts.weights_version
    versions = step.record.samples.facts.get(VERSIONS, np.zeros(0))
    if current < 0 or not versions.size or policy is None:
        return exact, mask
    of_token = step.rows.padded(versions)
    if isinstance(policy, Policy) and policy.has_experts:
        # A position has the experts of the newest weights that computed it.
        is_replaced = mask & (of_token < of_token.amax(dim=1, keepdim=True))
        of_token = torch.where(is_replaced, _REPLACED, of_token)
        if is_replaced.any():
            why = f"newer weights chose other experts before {int(is_replaced.sum())} tokens"
            step.results.skip("engine logprobs of older weights", why)
    expected, is_known = exact.clone(), of_token == current
    older = set(of_token[mask].int().tolist()) - {current, _REPLACED}
    for number in reversed([n for n in recorded_steps(run) if n < facts.step] if older else []):
        record = read_record(run, number)
        version = record.facts.weights_version
        if version in older:
            policy.load(named(record.state("before", "actor"), "weight"))
            where = of_token == version
            expected[where] = policy.score(step.rows.ids, mask)[0][where]
            is_known |= where
            older.remove(version)
        if not older or version <= min(older):
            break
    policy.load(named(step.states["actor"], "weight"))
    for version in sorted(older):
        num_tokens = int((mask & (of_token == version)).sum())
        step.results.skip(
            f"engine logprobs of version {version}", f"no record has the weights of {num_tokens}"
        )
    return expected, is_known


def estimate(step: ReplayedStep, numbers: Numbers, draw: Draw) -> DrawnInputs:
    """Compute and compare advantages, and the returns that a critic learns, in a draw."""
    config, samples, run = step.config, step.record.samples, step.record.values
    moments = step.decided.reward_moments or step.record.facts.reward_moments
    rewards, greedy, size = shaped_rewards(samples, step.rows.is_kept, config, moments)
    error = step.results.tolerances["sum"] * size
    step.results.tokens(
        "rewards",
        Pair(rewards[:, None], torch.from_numpy(run.rewards)[:, None]),
        torch.ones(len(rewards), 1, dtype=torch.bool),
        "number",
        scale=max(1.0, float(rewards.abs().max())),
        floor=error,
    )
    numbers = {
        name: draw.move(pair, torch.where(step.mask, step.rounding(pair.exact), 0.0))
        if name != "entropy"
        else pair
        for name, pair in numbers.items()
    }
    seen, seen_returns = (step.rows.padded(each) for each in (run.advantages, run.returns))
    if config.advantage_estimator not in ESTIMATORS:
        name = config.advantage_estimator
        step.results.skip("advantages", f"of {name}; the run's are taken")
        return DrawnInputs(numbers, Pair(seen, seen), seen_returns)
    components = {
        name.removeprefix(COMPONENT): torch.from_numpy(values).double()
        for name, values in samples.facts.items()
        if name.startswith(COMPONENT)
    }
    groups, lengths = torch.from_numpy(samples.group_ids), sampled_rows(samples).sum(dim=1).double()
    scores = Scores(rewards, greedy, groups, lengths, step.rows.is_kept, components)
    scores = _moved_scores(scores, error, step.results.tolerances["sum"], draw)
    advantages, returns = _estimate(step, numbers, scores, draw)
    pairs = {"returns": Pair(returns, seen_returns), "advantages": Pair(advantages, seen)}
    for name, pair in pairs.items():
        scale = max(float(pair.exact.abs().max()), 1e-6)
        step.results.tokens(name, pair, step.mask, "advantages", scale=scale)
    return DrawnInputs(numbers, pairs["advantages"], returns)


def _estimate(
    step: ReplayedStep, numbers: Numbers, scores: Scores, draw: Draw
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns: [rows, seq]."""
    config, mask, name = step.config, step.mask, step.config.advantage_estimator
    rewards, penalty = scores.rewards, torch.zeros(mask.shape, dtype=torch.float64)
    if name not in TOKEN_ESTIMATORS:
        rewards = row_advantages(name, scores, config.advantage_args or {})
    old, reference, coef = numbers["old"], numbers.get("reference"), step.kl_coef
    if not config.use_kl_loss and coef > 0 and reference is not None:
        penalty = coef * kl_term(kl_estimator(config), old, reference, old, mask, draw)
    rewards = token_rewards(rewards, mask, penalty, _paid_by_turn(step))
    if name == "gae" and "values" in numbers:
        values = numbers["values"].exact
        advantages = gae(rewards, values, mask, config, policy_lambds(mask, config))
        target = torch.where(mask, gae(rewards, values, mask, config, config.lambd) + values, 0.0)
    else:
        advantages = target = gae(rewards, torch.zeros_like(rewards), mask, config, 1.0)
    share = step.results.tolerances["sum"]
    rounding = torch.where(mask, share * advantages.abs().max(), 0.0)
    advantages = advantages + draw.signed(rounding)
    if name in WHITENING or config.advantages_norm:
        advantages = whitened(advantages, mask)
    if "teacher" in numbers:
        # log p - log q of each token, without discount.
        advantages = advantages + config.teacher_coef * numbers["teacher"].less(old, mask).exact
    if config.advantage_clip > 0:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return advantages, target


def _moved_scores(scores: Scores, error: float, share: float, draw: Draw) -> Scores:
    """Return rewards with the errors of a draw; equal ones have equal errors."""

    def move(values: Tensor) -> Tensor:
        return values + torch.sin(1e3 * draw.number * values) * (error + share * values.abs())

    components = {name: move(values) for name, values in scores.components.items()}
    rewards, greedy = move(scores.rewards), move(scores.greedy)
    return replace(scores, rewards=rewards, greedy=greedy, components=components)


def _paid_by_turn(step: ReplayedStep) -> Tensor:
    """Return the parts of rewards that are paid at the end of turns: [rows, seq]."""
    config, facts = step.config, step.record.samples.facts
    is_whole = config.reward_running_norm or config.reward_clip > 0
    is_placed = config.advantage_estimator in TOKEN_ESTIMATORS and not is_whole
    if not is_placed or TURN_REWARDS not in facts:
        return torch.zeros(step.mask.shape, dtype=torch.float64)
    return step.rows.padded(facts[TURN_REWARDS])


def mean_distance(values: Pair, mask: Tensor) -> float:
    """Return the mean distance per token, relative to 1 or to the value if larger."""
    distance = (values.run - values.exact).abs() / values.exact.abs().clamp(min=1.0)
    return float(distance[mask].mean())
