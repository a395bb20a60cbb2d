"""Leave-one-out baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.algorithms.advantages.groups import build_groups

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs


def rloo_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = R_i - mean of the other rows of the group = n / (n - 1) (R_i - mean).

    Source: Ahmadian et al. 2024, arXiv:2402.14740.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    count = groups.count_per_row
    centred = groups.rewards - groups.mean_per_row
    return groups.where_informative(centred * count / (count - 1).clamp(min=1), inputs.rewards)
