"""Advantages by every built-in estimator, one row and one token at a time.

Sources: group_norm, arXiv:2402.03300; dr_grpo, arXiv:2503.20783; group_mean_batch_std, TRL's
scale_rewards="batch"; rloo, arXiv:2402.14740; opo, arXiv:2505.23585; remax, arXiv:2310.10505;
cpgd, arXiv:2505.12504; reinforce++ and reinforce_baseline, arXiv:2501.03262; gae, arXiv:1506.02438.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lightrft.config import TrainConfig
from lightrft.tools.audit.record import Array, Flags, Integers

MIN_VARIANCE = 1e-8  # of what is whitened
TOKEN_ESTIMATORS = ("gae", "reinforce", "reinforce++")
WHITENING = ("gae", "reinforce++", "reinforce_baseline")


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of the rows of a step.

    Args:
        rewards, greedy: [rows]; greedy rewards are NaN without.
        groups: [rows] int64.
        lengths: [rows] response tokens, of excluded rows too.
        is_kept: [rows] bool; the others have no part in their group.
    """

    rewards: Array
    greedy: Array
    groups: Integers
    lengths: Integers
    is_kept: Flags


def row_advantages(name: str, scores: Scores, given: Mapping[str, object]) -> Array:
    """One advantage a row; 0 for excluded rows and in groups of equal rewards.

    Args:
        name: Of the estimator.
        scores: Rewards and groups.
        given: Hyper-parameters by name.
    """
    found = np.zeros(len(scores.rewards))
    if name == "remax":
        found[scores.is_kept] = (scores.rewards - scores.greedy)[scores.is_kept]
        return found
    batch_std = _std(scores.rewards[scores.is_kept])
    groups = [np.flatnonzero(scores.groups == g) for g in np.unique(scores.groups)]
    members = [rows[scores.is_kept[rows]] for rows in groups]
    informative = [rows for rows in members if len(rows) and np.ptp(scores.rewards[rows]) > 0]
    share = min(len(groups) / max(len(informative), 1), 3.0)
    for rows in informative:
        own, lengths = scores.rewards[rows], scores.lengths[rows].astype(np.float64)
        found[rows] = _GROUP[name](own, lengths, dict(given), batch_std, share)
    return found


def enlargement(advantages: Array, scores: Scores) -> float:
    """By how much an estimator makes differences of a group's rewards larger, at least 2."""
    found = 1.0
    for group in np.unique(scores.groups):
        rows = (scores.groups == group) & scores.is_kept
        largest = float(np.abs(advantages[rows]).max(initial=0.0))
        if largest > 0 and np.ptp(scores.rewards[rows]) > 0:
            found = max(found, largest / float(np.ptp(scores.rewards[rows])))
    return 2 * found


def _std(values: Array) -> float:
    """With n - 1; 1 where that is undefined or 0."""
    if len(values) < 2 or np.ptp(values) == 0:
        return 1.0
    return float(np.std(values, ddof=1))


def _number(given: Mapping[str, object], name: str, default: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number: got {value!r}")
    return float(value)


def _group_norm(r: Array, _: Array, given: Mapping[str, object], __: float, ___: float) -> Array:
    return np.asarray((r - r.mean()) / (np.std(r, ddof=1) + _number(given, "eps", 1e-6)))


def _batch_std(r: Array, _: Array, given: Mapping[str, object], std: float, __: float) -> Array:
    return np.asarray((r - r.mean()) / (std + _number(given, "eps", 1e-6)))


def _centred(r: Array, _: Array, __: Mapping[str, object], ___: float, ____: float) -> Array:
    return np.asarray(r - r.mean())


def _rloo(r: Array, _: Array, __: Mapping[str, object], ___: float, ____: float) -> Array:
    others = (r.sum() - r) / (len(r) - 1)
    return np.asarray(r - others)


def _opo(r: Array, n: Array, _: Mapping[str, object], __: float, ___: float) -> Array:
    return np.asarray(r - (n * r).sum() / max(n.sum(), 1.0))


def _cpgd(r: Array, n: Array, given: Mapping[str, object], std: float, share: float) -> Array:
    weighting = given.get("weighting", "std")
    if weighting == "std":
        return _group_norm(r, n, {}, std, share)
    return np.asarray((r - r.mean()) * (share if weighting == "clip_filter" else 1.0))


_GROUP: dict[str, Callable[[Array, Array, Mapping[str, object], float, float], Array]] = {
    "group_norm": _group_norm,
    "grpo": _group_norm,
    "group_mean_batch_std": _batch_std,
    "dr_grpo": _centred,
    "reinforce_baseline": _centred,
    "rloo": _rloo,
    "opo": _opo,
    "cpgd": _cpgd,
}
ESTIMATORS = (*_GROUP, "remax", *TOKEN_ESTIMATORS)


def token_rewards(rewards: Array, mask: Flags, penalty: Array) -> Array:
    """The row's reward on its last response token, less the penalty of each token: [rows, seq]."""
    found = np.where(mask, -penalty, 0.0)
    for row in np.flatnonzero(mask.any(axis=1)):
        found[row, np.flatnonzero(mask[row])[-1]] += rewards[row]
    return found


def backwards(mask: Flags, config: TrainConfig) -> Iterator[tuple[int, int, float]]:
    """Row, token and discount after it, of every response token from the last one on.

    With `turn_credit` discounted, gamma counts turns: it acts where the next response token does
    not follow at once, since an observation stands between.
    """
    for row in range(len(mask)):
        following = -1
        for t in np.flatnonzero(mask[row])[::-1]:
            is_step = config.turn_credit == "last" or following != t + 1
            yield row, int(t), config.gamma if is_step else 1.0
            following = int(t)


def returns(rewards: Array, mask: Flags, config: TrainConfig) -> Array:
    """Discounted return from each response token on: [rows, seq]."""
    found, rest = np.zeros_like(rewards), np.zeros(len(mask))
    for row, t, discount in backwards(mask, config):
        rest[row] = found[row, t] = rewards[row, t] + discount * rest[row]
    return found


def gae(rewards: Array, values: Array, mask: Flags, config: TrainConfig) -> Array:
    """Generalised advantages: [rows, seq]; after the last response token the value is 0."""
    found = np.zeros_like(rewards)
    next_value, next_advantage = np.zeros(len(mask)), np.zeros(len(mask))
    for row, t, discount in backwards(mask, config):
        delta = rewards[row, t] + discount * next_value[row] - values[row, t]
        found[row, t] = delta + discount * config.lambd * next_advantage[row]
        next_value[row], next_advantage[row] = values[row, t], found[row, t]
    return found


def whitened(advantages: Array, mask: Flags) -> tuple[Array, float]:
    """(A - mean) / std over the tokens of the step, std with n, and that std."""
    inside = advantages[mask]
    if inside.size == 0:
        return advantages, 1.0
    variance = float(((inside - inside.mean()) ** 2).mean())
    # What float32 leaves of equal numbers is no variance.
    is_constant = np.ptp(inside) == 0 or variance <= (1e-14 * inside.mean()) ** 2
    std = 1.0 if is_constant else math.sqrt(max(variance, MIN_VARIANCE))
    return np.where(mask, (advantages - inside.mean()) / std, 0.0), std
