"""The variance-optimal baseline under a length-weighted gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.algorithms.advantages.groups import build_groups

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs


def opo_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = R_i - sum_j l_j R_j / sum_j l_j over the group, l the response lengths.

    Equal lengths give Dr.GRPO. Meant for exactly on-policy training without KL and entropy terms.

    Source: Hao et al. 2025, arXiv:2505.23585.

    Returns:
        [rows].
    """
    groups = build_groups(inputs)
    lengths = inputs.lengths.double()
    weighted = groups.sum_per_row(lengths * groups.rewards)
    baseline = weighted / groups.sum_per_row(lengths).clamp(min=1)
    return groups.where_informative(groups.rewards - baseline, inputs.rewards)
