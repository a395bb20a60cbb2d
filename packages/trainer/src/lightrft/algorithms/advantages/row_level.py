"""Rewards of rows, and the estimators that give one advantage per row from those of a prompt."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightrft.algorithms.interface import (
    AdvantageFunction,
    RowAdvantageInputs,
    TokenAdvantages,
    advantage_estimator,
    advantage_traits,
    lookup,
)
from lightrft.algorithms.moments import Moments, moments_of, spread

MAX_FILTER_WEIGHT = 3.0


def estimate_row_advantages(estimator: AdvantageFunction, inputs: RowAdvantageInputs) -> Tensor:
    """Return one advantage per row of all ranks: [rows].

    Raises:
        ValueError: the estimator is token-level, or does not give one number per row.
    """
    if advantage_traits(estimator).is_token_level:
        raise ValueError("this estimator is token-level: call estimate_token_advantages")
    advantages = estimator(inputs)
    if isinstance(advantages, TokenAdvantages) or advantages.shape != inputs.rewards.shape:
        raise ValueError(
            f"{estimator} must return one advantage per row, a tensor of shape "
            f"{tuple(inputs.rewards.shape)}; declare is_token_level=True if it works on tokens"
        )
    return advantages


def clip_rewards(rewards: Tensor, *, limit: float) -> tuple[Tensor, Tensor]:
    """Rewards held within +-limit, and which were changed: [rows], [rows] bool.

    Raises:
        ValueError: limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"reward clip must be positive: got {limit}")
    return rewards.clamp(-limit, limit), rewards.abs() > limit


def normalize_rewards(rewards: Tensor, moments: Moments, *, minus_mean: bool = False) -> Tensor:
    """Rewards / std, or (rewards - mean) / std: [rows].

    Args:
        rewards: [rows].
        moments: Moments of all rewards so far, on all ranks: local ones would differ between ranks.
            The standard deviation divides by count - 1 and is 1 where all rewards were equal.
        minus_mean: Subtract the mean, too.
    """
    centred = rewards.double() - moments.mean if minus_mean else rewards.double()
    return (centred / moments.std(ddof=1)).to(rewards.dtype)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted into groups; all sums in float64, over scored rows only.

    Args:
        index: [rows] int64, group of each row.
        rewards: [rows] float64, 0 where not scored.
        is_scored: [rows] bool.
        counts: [groups] float64, scored rows.
        dtype: Type of the advantages.
    """

    index: Tensor
    rewards: Tensor
    is_scored: Tensor
    counts: Tensor
    dtype: torch.dtype

    def sum_per_row(self, values: Tensor) -> Tensor:
        """Sum of `values` [rows] over the scored rows of each row's group: [rows]."""
        values = torch.where(self.is_scored, values.double(), 0.0)
        return values.new_zeros(len(self.counts)).index_add(0, self.index, values)[self.index]

    @property
    def count_per_row(self) -> Tensor:
        """[rows] float64, scored rows of each row's group; at least 1."""
        return self.counts[self.index].clamp(min=1)

    @property
    def centred(self) -> Tensor:
        """[rows] float64, rewards less the mean of their group."""
        return self.rewards - self.sum_per_row(self.rewards) / self.count_per_row

    @property
    def std(self) -> Tensor:
        """[rows] float64, standard deviation of each row's group with n - 1; 0 of one row."""
        squares = self.sum_per_row(self.centred.square())
        return (squares / (self.count_per_row - 1).clamp(min=1)).sqrt()

    @property
    def has_signal(self) -> Tensor:
        """[rows] bool, the group's rewards are not all equal.

        The smallest is compared with the largest: a standard deviation of equal rewards is
        rounding error that a division would amplify.
        """
        reduce = self.rewards.new_zeros(len(self.counts))
        inf = torch.full_like(self.rewards, torch.inf)
        low = torch.where(self.is_scored, self.rewards, inf)
        high = torch.where(self.is_scored, self.rewards, -inf)
        lowest = reduce.scatter_reduce(0, self.index, low, "amin", include_self=False)
        highest = reduce.scatter_reduce(0, self.index, high, "amax", include_self=False)
        return (spread(lowest, highest) > 0)[self.index]

    def where_informative(self, values: Tensor) -> Tensor:
        """`values` [rows], 0 for unscored rows and constant groups."""
        return torch.where(self.is_scored & self.has_signal, values, 0.0).to(self.dtype)


def scored_rewards(
    rewards: Tensor, is_scored: Tensor | None, *, name: str = "rewards"
) -> tuple[Tensor, Tensor]:
    """Rewards in float64, 0 where not scored, and which are: [rows], [rows] bool.

    Raises:
        ValueError: a scored reward is not finite, or there is not one number per row.
    """
    values = rewards.detach().double()
    if is_scored is None:
        is_scored = torch.ones_like(values, dtype=torch.bool)
    if values.dim() != 1 or values.shape != is_scored.shape:
        raise ValueError(
            f"{name} must be one number per row: got shapes {tuple(values.shape)} and "
            f"{tuple(is_scored.shape)} of the rows that are scored"
        )
    is_bad = is_scored & ~torch.isfinite(values)
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise ValueError(f"{name} must be finite: row {row} has {float(values[row])}")
    return torch.where(is_scored, values, 0.0), is_scored


def build_groups(inputs: RowAdvantageInputs) -> Groups:
    """Groups of the rows of a step.

    Raises:
        ValueError: shapes differ, a scored reward is not finite, or a group has a single row.
    """
    rewards, is_scored = scored_rewards(inputs.rewards, inputs.is_scored)
    if rewards.shape != inputs.group_ids.shape:
        raise ValueError(
            "rewards and group_ids must be one number per row: got shapes "
            f"{tuple(rewards.shape)} and {tuple(inputs.group_ids.shape)}"
        )
    unique, index, num_rows = torch.unique(
        inputs.group_ids, return_inverse=True, return_counts=True
    )
    if bool((num_rows < 2).any()):
        group = int(unique[num_rows < 2][0])
        raise ValueError(
            f"group {group} has a single completion, so it has no group baseline: set "
            "n_samples_per_prompt to at least 2, or use the estimator reinforce, reinforce++ or gae"
        )
    counts = rewards.new_zeros(len(unique)).index_add(0, index, is_scored.double())
    return Groups(index, rewards, is_scored, counts, inputs.rewards.dtype)


@advantage_estimator(needs_groups=True)
def group_norm_advantages(inputs: RowAdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """GRPO: A_i = (R_i - mean) / (std + eps), std with n - 1; 0 in a constant group.

    Source: Shao et al. 2024, arXiv:2402.03300 (which leaves n or n - 1 open).

    Args:
        inputs: Rows of all ranks.
        eps: Added to the standard deviation.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    return groups.where_informative(groups.centred / (groups.std + eps))


@advantage_estimator(needs_groups=True)
def group_mean_batch_std_advantages(inputs: RowAdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean of the group) / (std of all rewards of the step + eps), std with n - 1.

    Unlike `group_norm` it does not raise the weight of prompts that are nearly always or nearly
    never solved.

    Source: TRL's scale_rewards="batch"; Liu et al. 2025, arXiv:2508.08221.

    Args:
        inputs: Rows of all ranks.
        eps: Added to the standard deviation.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    std = moments_of(groups.rewards[groups.is_scored]).std(ddof=1)
    return groups.where_informative(groups.centred / (std + eps))


@advantage_estimator(needs_groups=True)
def group_centred_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """Dr.GRPO: A_i = R_i - mean of the group.

    Source: Liu et al. 2025, arXiv:2503.20783.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    return groups.where_informative(groups.centred)


@advantage_estimator(needs_groups=True, whitens=True)
def reinforce_baseline_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """REINFORCE++-baseline: centred by group, then whitened over all tokens of the step.

    Source: Hu 2025, arXiv:2501.03262.

    Returns:
        [rows].
    """
    return group_centred_advantages(inputs)


@advantage_estimator(needs_groups=True)
def rloo_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = R_i - mean of the other rows of the group = n / (n - 1) (R_i - mean).

    Source: Ahmadian et al. 2024, arXiv:2402.14740.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    count = groups.count_per_row
    return groups.where_informative(groups.centred * count / (count - 1).clamp(min=1))


@advantage_estimator(needs_groups=True)
def opo_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = R_i - sum_j l_j R_j / sum_j l_j over the group, l the response lengths.

    The variance-optimal baseline under a length-weighted gradient; equal lengths give Dr.GRPO.
    Meant for exactly on-policy training without KL and entropy terms.

    Source: Hao et al. 2025, arXiv:2505.23585.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    lengths = inputs.lengths.double()
    weighted = groups.sum_per_row(lengths * groups.rewards)
    baseline = weighted / groups.sum_per_row(lengths).clamp(min=1)
    return groups.where_informative(groups.rewards - baseline)


@advantage_estimator(needs_groups=True)
def batch_mean_group_std_advantages(inputs: RowAdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean of all rewards of the step) / (std of the group + eps), std with n - 1.

    0 in a constant group. Source: AReaL's normalisation with a mean of the batch.

    Args:
        inputs: Rows of all ranks.
        eps: Added to the standard deviation.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    mean = moments_of(groups.rewards[groups.is_scored]).mean
    return groups.where_informative((groups.rewards - mean) / (groups.std + eps))


@advantage_estimator(needs_groups=True)
def maxrl_advantages(inputs: RowAdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean) / (mean + eps) over the group; 0 in a constant group.

    With rewards of 0 and 1 it estimates the gradient of the log of the success rate.

    Source: MaxRL, as in SkyRL and github.com/tajwarfahim/maxrl.

    Args:
        inputs: Rows of all ranks.
        eps: Added to the mean.

    Returns:
        [rows].

    Raises:
        ValueError: a reward is negative: a group's mean is no success rate then.
    """
    groups = build_groups(inputs)
    if bool((groups.rewards < 0).any()):
        lowest = float(groups.rewards.min())
        raise ValueError(
            f"the maxrl estimator needs rewards of at least 0, such as 0 and 1: got {lowest}; "
            "leave out penalties and reward normalisation, or take another estimator"
        )
    mean = groups.rewards - groups.centred
    return groups.where_informative(groups.centred / (mean + eps))


@advantage_estimator(needs_groups=True)
def pass_at_k_advantages(inputs: RowAdvantageInputs, *, eps: float = 1e-6) -> Tensor:
    """Pass@k: A_i = (R_1 - R_2) / (std + eps) for a group's best row, 0 for the others.

    R_1 and R_2 are the best and the second best reward. A_i is the leave-one-out advantage of the
    group's maximum, for pass@k with k the group's size.

    Source: Tang et al. 2025, arXiv:2503.19595, as in verl.

    Args:
        inputs: Rows of all ranks.
        eps: Added to the standard deviation.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    lead = torch.zeros_like(groups.rewards)
    for group in range(len(groups.counts)):
        rows = torch.nonzero((groups.index == group) & groups.is_scored).squeeze(-1)
        if len(rows) > 1:
            best, second = groups.rewards[rows].topk(2).indices.tolist()
            lead[rows[best]] = groups.rewards[rows[best]] - groups.rewards[rows[second]]
    return groups.where_informative(lead / (groups.std + eps))


@advantage_estimator(needs_groups=True)
def raft_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """RAFT: A_i = T / T_best for the best row of each group, 0 for the others.

    T counts the sampled tokens of all scored rows of the step, T_best those of the best rows. With
    token-mean and one optimizer batch per step, this makes the loss `reinforce` supervised training
    on the best rows. Of equal rewards the first row is the best; a constant group has none.

    Source: Dong et al. 2023, arXiv:2304.06767, with n samples of a prompt and the best kept.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    is_best = torch.zeros_like(groups.is_scored)
    for group in range(len(groups.counts)):
        rows = torch.nonzero((groups.index == group) & groups.is_scored).squeeze(-1)
        if len(rows):
            is_best[rows[groups.rewards[rows].argmax()]] = True
    chosen = groups.where_informative(is_best.double()).double()
    lengths = inputs.lengths.double()
    scale = (lengths * groups.is_scored).sum() / (lengths * chosen).sum().clamp(min=1)
    return (chosen * scale).to(inputs.rewards.dtype)


@advantage_estimator()
def zero_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = 0: rewards are reported only, and the teacher alone trains.

    Returns:
        [rows].
    """
    return torch.zeros_like(inputs.rewards)


@advantage_estimator(needs_groups=True, reads_components=True)
def gdpo_advantages(
    inputs: RowAdvantageInputs, *, components: str = "", eps: float = 1e-6
) -> Tensor:
    """GDPO: A_i = S_i / (std of S over the step + eps), std with n - 1.

    S_i = sum over components k of w_k (R_ik - mean_k) / (std_k + eps) within the group, so that no
    component is lost in the sum of the rewards; the mean of S is 0.

    Source: Liu et al. 2026, arXiv:2601.05242.

    Args:
        inputs: Rows of all ranks.
        components: Names, each with a weight that is not 1: "correct,format=0.5"; "" is the reward
            itself. Rows without one count with the others.
        eps: Added to the standard deviations.

    Returns:
        [rows].

    Raises:
        ValueError: The reward has no such component, or a weight is no number.
    """
    groups = build_groups(inputs)
    known = {**inputs.components, "": inputs.rewards}
    total = torch.zeros_like(groups.rewards)
    for part in components.split(","):
        name, _, weight = (text.strip() for text in part.partition("="))
        if name not in known:
            raise ValueError(
                f"the reward has no component {name!r}: components of the gdpo estimator must be "
                f"of {', '.join(inputs.components) or 'a reward that has some'}"
            )
        is_scored = groups.is_scored & torch.isfinite(known[name])
        component_inputs = replace(inputs, rewards=known[name].double(), is_scored=is_scored)
        total += float(weight or 1) * group_norm_advantages(component_inputs, eps=eps)
    std = moments_of(total[groups.is_scored]).std(ddof=1)
    return (total / (std + eps)).to(inputs.rewards.dtype)


@advantage_estimator(needs_greedy_rewards=True)
def remax_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = R_i - R(greedy completion of the same prompt).

    Source: Li et al. 2023, arXiv:2310.10505.

    Returns:
        [rows].

    Raises:
        ValueError: `greedy_rewards` is missing, or a reward of a scored row is not finite.
    """
    if inputs.greedy_rewards is None:
        raise ValueError("the remax estimator needs greedy_rewards, one per row")
    rewards, is_scored = scored_rewards(inputs.rewards, inputs.is_scored)
    greedy, _ = scored_rewards(inputs.greedy_rewards, is_scored, name="greedy_rewards")
    return (rewards - greedy).to(inputs.rewards.dtype)


@advantage_estimator(needs_groups=True)
def gpg_advantages(inputs: RowAdvantageInputs, *, max_weight: float = float("inf")) -> Tensor:
    """GPG: A_i = (R_i - mean) min(G / G_informative, max_weight), G the number of groups.

    Constant groups do not dilute the step. The paper's loss is the policy loss `reinforce`.

    Source: Chu et al. 2025, arXiv:2504.02546, sec. 3.2.

    Args:
        inputs: Rows of all ranks.
        max_weight: Bound of the factor.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    num_groups = groups.counts.numel()
    num_informative = int(torch.unique(groups.index[groups.has_signal]).numel())
    weight = min(num_groups / max(num_informative, 1), max_weight)
    return groups.where_informative(groups.centred * weight)


CPGD_WEIGHTINGS: dict[str, Callable[[RowAdvantageInputs], Tensor]] = {
    "std": group_norm_advantages,
    "clip_filter": partial(gpg_advantages, max_weight=MAX_FILTER_WEIGHT),
    "centre": group_centred_advantages,
}


@advantage_estimator(needs_groups=True)
def cpgd_advantages(
    inputs: RowAdvantageInputs, *, weighting: Literal["std", "clip_filter", "centre"] = "std"
) -> Tensor:
    """Group advantages of CPGD.

    std: (R - mean) / (std + 1e-6);  centre: R - mean;
    clip_filter: (R - mean) min(G / G_informative, 3), G the number of groups of the step, so that
    constant groups do not dilute the step.

    Source: Liu et al. 2025, arXiv:2505.12504.

    Args:
        inputs: Rows of all ranks.
        weighting: "std", "clip_filter" or "centre".

    Returns:
        [rows].
    """
    return lookup(CPGD_WEIGHTINGS, weighting, kind="CPGD weighting")(inputs)
