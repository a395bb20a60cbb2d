"""Advantages of every built-in estimator, computed row by row and token by token.

Sources: group_norm, arXiv:2402.03300; dr_grpo, arXiv:2503.20783; group_mean_batch_std, TRL's
scale_rewards="batch"; rloo, arXiv:2402.14740; opo, arXiv:2505.23585; remax, arXiv:2310.10505;
cpgd, arXiv:2505.12504; reinforce++ and reinforce_baseline, arXiv:2501.03262; gae, arXiv:1506.02438;
pass_at_k, arXiv:2503.19595; maxrl, github.com/tajwarfahim/maxrl; batch_mean_group_std, AReaL;
raft, arXiv:2304.06767; gpg, arXiv:2504.02546; gdpo, arXiv:2601.05242; lambd of the policy in gae,
arXiv:2503.01491, 2504.05118.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lightrft.config.parts.learning import AlgorithmOptions
from lightrft.tools.audit.record import Array, Flags, Integers
from lightrft.tools.audit.samples import differ

MIN_VARIANCE = 1e-8  # of advantages before whitening
TOKEN_ESTIMATORS = ("gae", "reinforce", "reinforce++")
WHITENING = ("gae", "reinforce++", "reinforce_baseline")


Settings = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of the rows of a step.

    Args:
        rewards, greedy: [rows]; greedy rewards are NaN without a greedy completion.
        groups: Group of each row: [rows] int64.
        lengths: Response tokens of each row, including excluded rows: [rows].
        is_kept: Rows that count in their group: [rows] bool.
        components: Reward components by name: [rows]; NaN where missing.
    """

    rewards: Array
    greedy: Array
    groups: Integers
    lengths: Integers
    is_kept: Flags
    components: Mapping[str, Array] = field(default_factory=dict)


def row_advantages(name: str, scores: Scores, settings: Settings) -> Array:
    """Return one advantage per row; 0 for excluded rows and for groups of equal rewards.

    Args:
        name: Name of the estimator.
        scores: Rewards and groups.
        settings: Hyper-parameters by name.
    """
    advantages = np.zeros(len(scores.rewards))
    if name == "zero":
        return advantages
    if name == "remax":
        advantages[scores.is_kept] = (scores.rewards - scores.greedy)[scores.is_kept]
        return advantages
    if name == "gdpo":
        return _gdpo(scores, settings)
    batch = scores.rewards[scores.is_kept]
    groups = [np.flatnonzero(scores.groups == g) for g in np.unique(scores.groups)]
    members = [rows[scores.is_kept[rows]] for rows in groups]
    informative = [rows for rows in members if differ(scores.rewards[rows])]
    share = len(groups) / max(len(informative), 1)
    for rows in informative:
        lengths = scores.lengths[rows].astype(np.float64)
        advantages[rows] = _GROUP[name](
            _Group(scores.rewards[rows], lengths, batch, share, settings)
        )
    if name == "raft":  # tokens of all kept rows / tokens of the best rows
        kept, best = scores.lengths[scores.is_kept].sum(), scores.lengths[advantages > 0].sum()
        advantages *= kept / max(best, 1)
    return advantages


def _gdpo(scores: Scores, settings: Settings) -> Array:
    """Normalise components within groups, and their weighted sum over the step."""
    total, none = np.zeros(len(scores.rewards)), np.full(len(scores.rewards), math.nan)
    for part in str(settings.get("components", "")).split(","):
        name, _, weight = part.partition("=")
        values = scores.components.get(name.strip(), none) if name.strip() else scores.rewards
        has = scores.is_kept & np.isfinite(values)
        component = replace(scores, rewards=np.where(has, values, 0.0), is_kept=has)
        total += float(weight or 1) * row_advantages("group_norm", component, settings)
    return total / (_std(total[scores.is_kept]) + float(settings.get("eps", 1e-6)))


def enlargement(advantages: Array, scores: Scores) -> float:
    """Return how much an estimator enlarges reward differences within a group, at least 2."""
    largest_factor = 1.0
    for group in np.unique(scores.groups):
        rows = (scores.groups == group) & scores.is_kept
        largest = float(np.abs(advantages[rows]).max(initial=0.0))
        if largest > 0 and differ(scores.rewards[rows]):
            largest_factor = max(largest_factor, largest / float(np.ptp(scores.rewards[rows])))
    return 2 * largest_factor


def _std(values: Array) -> float:
    """Return the standard deviation with n - 1; 1 where it is undefined or 0."""
    if len(values) < 2 or np.ptp(values) == 0:
        return 1.0
    return float(np.std(values, ddof=1))


@dataclass(frozen=True, slots=True)
class _Group:
    """Rewards and response lengths of the kept rows of a prompt.

    Args:
        rewards, lengths: [rows].
        batch: Rewards of the kept rows of all groups.
        share: Number of groups / number of groups with unequal rewards.
        settings: Hyper-parameters by name.
    """

    rewards: Array
    lengths: Array
    batch: Array
    share: float
    settings: Settings

    @property
    def centred(self) -> Array:
        return np.asarray(self.rewards - self.rewards.mean())

    def over(self, std: float, deviations: Array | None = None) -> Array:
        numerators = self.centred if deviations is None else deviations
        return np.asarray(numerators / (std + float(self.settings.get("eps", 1e-6))))


def _group_norm(group: _Group) -> Array:
    return group.over(float(np.std(group.rewards, ddof=1)))


def _rloo(group: _Group) -> Array:
    r = group.rewards
    return np.asarray(r - (r.sum() - r) / (len(r) - 1))


def _gpg(group: _Group) -> Array:
    return group.centred * min(group.share, float(group.settings.get("max_weight", math.inf)))


def _opo(group: _Group) -> Array:
    r, n = group.rewards, group.lengths
    return np.asarray(r - (n * r).sum() / max(n.sum(), 1.0))


def _cpgd(group: _Group) -> Array:
    weighting = group.settings.get("weighting", "std")
    if weighting == "std":
        return _group_norm(group)
    return group.centred * (min(group.share, 3.0) if weighting == "clip_filter" else 1.0)


def _batch_mean_group_std(group: _Group) -> Array:
    from_batch = group.rewards - group.batch.mean()
    return group.over(float(np.std(group.rewards, ddof=1)), np.asarray(from_batch))


def _pass_at_k(group: _Group) -> Array:
    order, lead = np.argsort(-group.rewards, kind="stable"), np.zeros(len(group.rewards))
    lead[order[0]] = group.rewards[order[0]] - group.rewards[order[1]]
    return group.over(float(np.std(group.rewards, ddof=1)), lead)


def _best(group: _Group) -> Array:
    advantages = np.zeros(len(group.rewards))
    advantages[np.argsort(-group.rewards, kind="stable")[0]] = 1.0
    return advantages


_GROUP: dict[str, Callable[[_Group], Array]] = {
    "group_norm": _group_norm,
    "grpo": _group_norm,
    "group_mean_batch_std": lambda group: group.over(_std(group.batch)),
    "dr_grpo": lambda group: group.centred,
    "reinforce_baseline": lambda group: group.centred,
    "rloo": _rloo,
    "opo": _opo,
    "cpgd": _cpgd,
    "batch_mean_group_std": _batch_mean_group_std,
    "maxrl": lambda group: group.over(float(group.rewards.mean())),
    "pass_at_k": _pass_at_k,
    "raft": _best,
    "gpg": _gpg,
}
ESTIMATORS = (*_GROUP, "gdpo", "remax", "zero", *TOKEN_ESTIMATORS)


def token_rewards(rewards: Array, mask: Flags, penalty: Array, paid: Array) -> Array:
    """Return the reward of each token: [rows, seq].

    The last response token gets the row's reward minus earlier payments. Each token pays its
    penalty.
    """
    by_token = np.where(mask, paid - penalty, 0.0)
    for row in np.flatnonzero(mask.any(axis=1)):
        by_token[row, np.flatnonzero(mask[row])[-1]] += rewards[row] - paid[row, mask[row]].sum()
    return by_token


def backwards(mask: Flags, config: AlgorithmOptions) -> Iterator[tuple[int, int, float]]:
    """Yield (row, token, discount to the next token) of response tokens, from the last backwards.

    With `turn_credit` discounted, gamma counts turns: it applies only where an observation
    separates a response token from the next one.
    """
    for row in range(len(mask)):
        following = -1
        for t in np.flatnonzero(mask[row])[::-1]:
            is_step = config.turn_credit == "last" or following != t + 1
            yield row, int(t), config.gamma if is_step else 1.0
            following = int(t)


def returns(rewards: Array, mask: Flags, config: AlgorithmOptions) -> Array:
    """Return the discounted return from each response token on: [rows, seq]."""
    totals, rest = np.zeros_like(rewards), np.zeros(len(mask))
    for row, t, discount in backwards(mask, config):
        rest[row] = totals[row, t] = rewards[row, t] + discount * rest[row]
    return totals


def policy_lambds(mask: Flags, config: AlgorithmOptions) -> Array:
    """Return lambd of the policy's advantages: [rows]."""
    options = config.advantage_args or {}
    if "length_alpha" in options:
        lengths = np.maximum(mask.sum(axis=1), 1)
        return np.asarray(np.maximum(1 - 1 / (float(options["length_alpha"]) * lengths), 0.0))
    return np.full(len(mask), float(options.get("policy_lambd", config.lambd)))


def gae(
    rewards: Array,
    values: Array,
    mask: Flags,
    config: AlgorithmOptions,
    lambds: Array | None = None,
) -> Array:
    """Return generalised advantages: [rows, seq]; the value after the last token is 0."""
    lambds = np.full(len(mask), config.lambd) if lambds is None else lambds
    advantages = np.zeros_like(rewards)
    next_value, next_advantage = np.zeros(len(mask)), np.zeros(len(mask))
    for row, t, discount in backwards(mask, config):
        delta = rewards[row, t] + discount * next_value[row] - values[row, t]
        advantages[row, t] = delta + discount * lambds[row] * next_advantage[row]
        next_value[row], next_advantage[row] = values[row, t], advantages[row, t]
    return advantages


def whitened(advantages: Array, mask: Flags) -> tuple[Array, float]:
    """Return (A - mean) / std over the tokens of the step, and that std (with n)."""
    inside = advantages[mask]
    if inside.size == 0:
        return advantages, 1.0
    variance = float(((inside - inside.mean()) ** 2).mean())
    # Rounding errors of equal float32 numbers are not variance.
    is_constant = np.ptp(inside) == 0 or variance <= (1e-14 * inside.mean()) ** 2
    std = 1.0 if is_constant else math.sqrt(max(variance, MIN_VARIANCE))
    return np.where(mask, (advantages - inside.mean()) / std, 0.0), std
