"""Estimators that give one advantage per row, from the rewards of the rows of a prompt."""

from typing import Literal

import torch
from torch import Tensor

from lightrft.algorithms.advantages.groups import build_groups, scored_rewards
from lightrft.algorithms.declarations import advantage_estimator, advantage_traits
from lightrft.algorithms.lookup import lookup
from lightrft.algorithms.moments import moments_of
from lightrft.algorithms.types import AdvantageFunction, RowAdvantageInputs, TokenAdvantages

MAX_FILTER_WEIGHT = 3.0


def estimate_row_advantages(estimator: AdvantageFunction, inputs: RowAdvantageInputs) -> Tensor:
    """One advantage per row of all ranks: [rows].

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
    variance = groups.sum_per_row(groups.centred.square()) / (groups.count_per_row - 1).clamp(min=1)
    return groups.where_informative(groups.centred / (variance.sqrt() + eps), inputs.rewards)


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
    return groups.where_informative(groups.centred / (std + eps), inputs.rewards)


@advantage_estimator(needs_groups=True)
def group_centred_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """Dr.GRPO: A_i = R_i - mean of the group.

    Source: Liu et al. 2025, arXiv:2503.20783.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    return groups.where_informative(groups.centred, inputs.rewards)


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
    return groups.where_informative(
        groups.centred * count / (count - 1).clamp(min=1), inputs.rewards
    )


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
    return groups.where_informative(groups.rewards - baseline, inputs.rewards)


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


def _clip_filter_advantages(inputs: RowAdvantageInputs) -> Tensor:
    groups = build_groups(inputs)
    num_groups = groups.counts.numel()
    num_informative = int(torch.unique(groups.index[groups.has_signal]).numel())
    weight = min(num_groups / max(num_informative, 1), MAX_FILTER_WEIGHT)
    return groups.where_informative(groups.centred * weight, inputs.rewards)


CPGD_WEIGHTINGS = {
    "std": group_norm_advantages,
    "clip_filter": _clip_filter_advantages,
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
