"""Statistics of the rows that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.algorithms.advantages.types import RowAdvantageInputs


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted into groups; all sums in float64, over scored rows only.

    Args:
        index: [rows] int64, group of each row.
        rewards: [rows] float64, 0 where not scored.
        is_scored: [rows] bool.
        counts: [groups] float64, scored rows.
    """

    index: Tensor
    rewards: Tensor
    is_scored: Tensor
    counts: Tensor

    def sum_per_row(self, values: Tensor) -> Tensor:
        """Sum of `values` [rows] over the scored rows of each row's group: [rows]."""
        values = torch.where(self.is_scored, values.double(), 0.0)
        return values.new_zeros(len(self.counts)).index_add(0, self.index, values)[self.index]

    @property
    def count_per_row(self) -> Tensor:
        """[rows] float64, scored rows of each row's group; at least 1."""
        return self.counts[self.index].clamp(min=1)

    @property
    def mean_per_row(self) -> Tensor:
        """[rows] float64, mean reward of each row's group."""
        return self.sum_per_row(self.rewards) / self.count_per_row

    @property
    def has_signal(self) -> Tensor:
        """[rows] bool, the group's rewards are not all equal.

        Exact comparison of the smallest with the largest: a standard deviation of equal rewards
        is rounding dust that a division would amplify.
        """
        reduce = self.rewards.new_zeros(len(self.counts))
        inf = torch.full_like(self.rewards, torch.inf)
        low = torch.where(self.is_scored, self.rewards, inf)
        high = torch.where(self.is_scored, self.rewards, -inf)
        lowest = reduce.scatter_reduce(0, self.index, low, "amin", include_self=False)
        highest = reduce.scatter_reduce(0, self.index, high, "amax", include_self=False)
        return (highest > lowest)[self.index]

    def where_informative(self, values: Tensor, like: Tensor) -> Tensor:
        """`values` [rows], 0 for unscored rows and constant groups, in the dtype of `like`."""
        return torch.where(self.is_scored & self.has_signal, values, 0.0).to(like.dtype)


def build_groups(inputs: RowAdvantageInputs) -> Groups:
    """Groups of the rows of a step.

    Raises:
        ValueError: shapes differ, a scored reward is not finite, or a group has a single row.
    """
    rewards, ids = inputs.rewards.detach().double(), inputs.group_ids
    if rewards.dim() != 1 or rewards.shape != ids.shape:
        raise ValueError(
            "rewards and group_ids must be one number per row: got shapes "
            f"{tuple(rewards.shape)} and {tuple(ids.shape)}"
        )
    is_scored = inputs.is_scored
    if is_scored is None:
        is_scored = torch.ones_like(rewards, dtype=torch.bool)
    if not bool(torch.isfinite(rewards[is_scored]).all()):
        row = int((is_scored & ~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"rewards must be finite: row {row} has {float(rewards[row])}")
    unique, index, num_rows = torch.unique(ids, return_inverse=True, return_counts=True)
    if bool((num_rows < 2).any()):
        group = int(unique[num_rows < 2][0])
        raise ValueError(
            f"group {group} has a single completion, so it has no group baseline: set "
            "n_samples_per_prompt to at least 2, or use the estimator reinforce, reinforce++ or gae"
        )
    counts = rewards.new_zeros(len(unique)).index_add(0, index, is_scored.double())
    return Groups(index, torch.where(is_scored, rewards, 0.0), is_scored, counts)


def group_has_signal(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Whether the group of each row has unequal scores: [rows] bool.

    Dynamic sampling (DAPO, arXiv:2503.14476) keeps these. Pass the unshaped accuracy: with a
    length penalty in the score every group has a signal.

    Args:
        scores: [rows].
        group_ids: [rows] int64.
    """
    unique, index = torch.unique(group_ids, return_inverse=True)
    empty = scores.new_zeros(len(unique))
    lowest = empty.scatter_reduce(0, index, scores, "amin", include_self=False)
    highest = empty.scatter_reduce(0, index, scores, "amax", include_self=False)
    return (highest > lowest)[index]
