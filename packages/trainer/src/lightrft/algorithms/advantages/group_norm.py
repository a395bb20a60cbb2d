"""Rewards normalised within the group of one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.algorithms.advantages.groups import build_groups

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs


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
    centred = groups.rewards - groups.mean_per_row
    variance = groups.sum_per_row(centred.square()) / (groups.count_per_row - 1).clamp(min=1)
    return groups.where_informative(centred / (variance.sqrt() + eps), inputs.rewards)


def group_centred_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """Dr.GRPO: A_i = R_i - mean of the group.

    Source: Liu et al. 2025, arXiv:2503.20783. Also the baseline of REINFORCE++-baseline.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    return groups.where_informative(groups.rewards - groups.mean_per_row, inputs.rewards)
