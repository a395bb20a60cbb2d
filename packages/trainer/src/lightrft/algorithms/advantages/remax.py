"""The greedy completion as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs


def remax_advantages(inputs: RowAdvantageInputs) -> Tensor:
    """A_i = R_i - R(greedy completion of the same prompt).

    Source: Li et al. 2023, arXiv:2310.10505.

    Returns:
        [rows].

    Raises:
        ValueError: `greedy_rewards` is missing.
    """
    if inputs.greedy_rewards is None:
        raise ValueError("the remax estimator needs greedy_rewards, one per row")
    advantages = inputs.rewards.detach() - inputs.greedy_rewards.detach()
    if inputs.is_scored is None:
        return advantages
    return torch.where(inputs.is_scored, advantages, 0.0)
