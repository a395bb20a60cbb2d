"""Statistics of the rows that share a prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.types import RowAdvantageInputs


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
    def centred(self) -> Tensor:
        """[rows] float64, rewards less the mean of their group."""
        return self.rewards - self.sum_per_row(self.rewards) / self.count_per_row

    @property
    def has_signal(self) -> Tensor:
        """[rows] bool, the group's rewards are not all equal.

        Exact comparison of the smallest with the largest: a standard deviation of equal rewards
        is rounding error that a division would amplify.
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
    return Groups(index, rewards, is_scored, counts)
