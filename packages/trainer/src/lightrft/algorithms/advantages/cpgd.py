"""The three weightings of CPGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightrft.algorithms.advantages.group_norm import (
    group_centred_advantages,
    group_norm_advantages,
)
from lightrft.algorithms.advantages.groups import build_groups
from lightrft.algorithms.lookup import lookup

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs

MAX_FILTER_WEIGHT = 3.0


def _clip_filter(inputs: RowAdvantageInputs) -> Tensor:
    groups = build_groups(inputs)
    num_groups = groups.counts.numel()
    num_informative = int(torch.unique(groups.index[groups.has_signal]).numel())
    weight = min(num_groups / max(num_informative, 1), MAX_FILTER_WEIGHT)
    centred = groups.rewards - groups.mean_per_row
    return groups.where_informative(centred * weight, inputs.rewards)


CPGD_WEIGHTINGS = {
    "std": group_norm_advantages,
    "clip_filter": _clip_filter,
    "centre": group_centred_advantages,
}


def cpgd_advantages(inputs: RowAdvantageInputs, *, weighting: str = "std") -> Tensor:
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
