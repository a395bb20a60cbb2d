"""Advantages of every built-in estimator, computed group by group and token by token.

Sources: group_norm, arXiv:2402.03300; dr_grpo, arXiv:2503.20783; group_mean_batch_std, TRL's
scale_rewards="batch"; rloo, arXiv:2402.14740; opo, arXiv:2505.23585; remax, arXiv:2310.10505;
cpgd, arXiv:2505.12504; reinforce++ and reinforce_baseline, arXiv:2501.03262; gae, arXiv:1506.02438;
pass_at_k, arXiv:2503.19595; maxrl, github.com/tajwarfahim/maxrl; batch_mean_group_std, AReaL;
raft, arXiv:2304.06767; gpg, arXiv:2504.02546; gdpo, arXiv:2601.05242; lambd of the policy in gae,
arXiv:2503.01491, 2504.05118.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightrft.config.parts.learning import AlgorithmOptions
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
        lengths: Response tokens of each row, including excluded rows: [rows] float64.
        is_kept: Rows that count in their group: [rows] bool.
        components: Reward components by name: [rows]; NaN where missing.
    """

    rewards: Tensor
    greedy: Tensor
    groups: Tensor
    lengths: Tensor
    is_kept: Tensor
    components: Mapping[str, Tensor] = field(default_factory=dict)


def row_advantages(name: str, scores: Scores, settings: Settings) -> Tensor:
    """Return one advantage per row; 0 for excluded rows and for groups of equal rewards.

    Args:
        name: Name of the estimator.
        scores: Rewards and groups.
        settings: Hyper-parameters by name.
    """
    advantages, is_kept = torch.zeros_like(scores.rewards), scores.is_kept
    if name == "zero":
        return advantages
    if name == "remax":
        return torch.where(is_kept, scores.rewards - scores.greedy, 0.0)
    if name == "gdpo":
        return _gdpo(scores, settings)
    members = [
        (is_kept & (scores.groups == g)).nonzero()[:, 0] for g in set(scores.groups.tolist())
    ]
    informative = [rows for rows in members if differ(scores.rewards[rows])]
    share = len(members) / max(len(informative), 1)
    for rows in informative:
        rewards, batch = scores.rewards[rows], scores.rewards[is_kept]
        group = _Group(rewards, scores.lengths[rows], batch, share, settings)
        advantages[rows] = _GROUP[name](group)
    if name == "raft":  # tokens of all kept rows / tokens of the best rows
        best = scores.lengths[advantages > 0].sum().clamp(min=1)
        advantages *= scores.lengths[is_kept].sum() / best
    return advantages


def _gdpo(scores: Scores, settings: Settings) -> Tensor:
    """Normalise components within groups, and their weighted sum over the step."""
    total = torch.zeros_like(scores.rewards)
    missing = torch.full_like(total, math.nan)
    for part in str(settings.get("components", "")).split(","):
        name, _, weight = part.partition("=")
        name = name.strip()
        values = scores.components.get(name, missing) if name else scores.rewards
        has = scores.is_kept & values.isfinite()
        component = replace(scores, rewards=torch.where(has, values, 0.0), is_kept=has)
        total = total + float(weight or 1) * row_advantages("group_norm", component, settings)
    return total / (_std(total[scores.is_kept]) + float(settings.get("eps", 1e-6)))


def _std(values: Tensor) -> float:
    """Return the standard deviation with n - 1; 1 where it is undefined or 0."""
    return float(values.std()) if len(values) > 1 and values.max() > values.min() else 1.0


@dataclass(frozen=True, slots=True)
class _Group:
    """Rewards and response lengths of the kept rows of a prompt.

    Args:
        rewards, lengths: [rows].
        batch: Rewards of the kept rows of all groups.
        share: Number of groups / number of groups with unequal rewards.
        settings: Hyper-parameters by name.
    """

    rewards: Tensor
    lengths: Tensor
    batch: Tensor
    share: float
    settings: Settings

    @property
    def centred(self) -> Tensor:
        return self.rewards - self.rewards.mean()

    def over(self, std: float, deviations: Tensor | None = None) -> Tensor:
        numerators = self.centred if deviations is None else deviations
        return numerators / (std + float(self.settings.get("eps", 1e-6)))

    def over_std(self, deviations: Tensor | None = None) -> Tensor:
        return self.over(float(self.rewards.std()), deviations)

    def weighted(self, max_weight: float) -> Tensor:
        return self.centred * min(self.share, max_weight)

    @property
    def order(self) -> Tensor:
        return torch.argsort(self.rewards, descending=True, stable=True)


def _rloo(group: _Group) -> Tensor:
    r = group.rewards
    return r - (r.sum() - r) / (len(r) - 1)


def _opo(group: _Group) -> Tensor:
    r, n = group.rewards, group.lengths
    return r - (n * r).sum() / n.sum().clamp(min=1)


def _cpgd(group: _Group) -> Tensor:
    weighting = group.settings.get("weighting", "std")
    if weighting == "std":
        return group.over_std()
    return group.weighted(3.0 if weighting == "clip_filter" else 1.0)


def _pass_at_k(group: _Group) -> Tensor:
    lead, (first, second, *_) = torch.zeros_like(group.rewards), group.order
    lead[first] = group.rewards[first] - group.rewards[second]
    return group.over_std(lead)


def _best(group: _Group) -> Tensor:
    advantages = torch.zeros_like(group.rewards)
    advantages[group.order[0]] = 1.0
    return advantages


_GROUP: dict[str, Callable[[_Group], Tensor]] = {
    "group_norm": _Group.over_std,
    "grpo": _Group.over_std,
    "group_mean_batch_std": lambda group: group.over(_std(group.batch)),
    "dr_grpo": lambda group: group.centred,
    "reinforce_baseline": lambda group: group.centred,
    "rloo": _rloo,
    "opo": _opo,
    "cpgd": _cpgd,
    "batch_mean_group_std": lambda group: group.over_std(group.rewards - group.batch.mean()),
    "maxrl": lambda group: group.over(float(group.rewards.mean())),
    "pass_at_k": _pass_at_k,
    "raft": _best,
    "gpg": lambda group: group.weighted(float(group.settings.get("max_weight", math.inf))),
}
ESTIMATORS = (*_GROUP, "gdpo", "remax", "zero", *TOKEN_ESTIMATORS)


def token_rewards(rewards: Tensor, mask: Tensor, penalty: Tensor, paid: Tensor) -> Tensor:
    """Return the reward of each token: [rows, seq].

    The last response token gets the row's reward minus earlier payments. Each token pays its
    penalty.
    """
    paid = torch.where(mask, paid, 0.0)
    rest = (rewards - paid.sum(dim=1))[:, None]
    is_last = mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    return torch.where(mask, paid - penalty, 0.0) + torch.where(is_last, rest, 0.0)


def policy_lambds(mask: Tensor, config: AlgorithmOptions) -> Tensor:
    """Return lambd of the policy's advantages: [rows]."""
    options = config.advantage_args or {}
    lengths = mask.sum(dim=1).clamp(min=1).double()
    if "length_alpha" in options:
        return (1 - 1 / (float(options["length_alpha"]) * lengths)).clamp(min=0.0)
    return torch.full_like(lengths, float(options.get("policy_lambd", config.lambd)))


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, config: AlgorithmOptions, lambds: Tensor | float
) -> Tensor:
    """Return generalised advantages: [rows, seq]; the value after the last token is 0.

    With values of 0 and lambd 1 they are the discounted returns. With `turn_credit` discounted,
    gamma counts turns: it applies only where an observation separates a response token from the
    next one.
    """
    advantages = torch.zeros_like(rewards)
    value, advantage = torch.zeros(2, len(mask), dtype=torch.float64)
    gamma = torch.tensor(config.gamma, dtype=torch.float64)
    follows = torch.zeros(len(mask), dtype=torch.bool)  # the next token belongs to the same turn
    for t in reversed(range(mask.shape[1])):
        is_turn = follows & (config.turn_credit != "last")
        discount = torch.where(is_turn, 1.0, gamma)
        delta = rewards[:, t] + discount * value - values[:, t]
        advantage = torch.where(mask[:, t], delta + discount * lambds * advantage, advantage)
        value = torch.where(mask[:, t], values[:, t], value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        follows = mask[:, t]
    return advantages


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean) / std over the tokens of the step, with n."""
    inside = advantages[mask]
    if not len(inside):
        return advantages
    mean, variance = inside.mean(), float(inside.var(correction=0))
    # Rounding errors of equal float32 numbers are not variance.
    is_constant = inside.max() == inside.min() or variance <= float(1e-14 * mean) ** 2
    std = 1.0 if is_constant else math.sqrt(max(variance, MIN_VARIANCE))
    return torch.where(mask, (advantages - mean) / std, 0.0)
