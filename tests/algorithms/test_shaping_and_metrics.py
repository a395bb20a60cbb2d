"""Reward shaping, running moments and the numbers that describe a step."""

import pytest
import torch

from lightrft.algorithms.advantages.row_level import clip_rewards, normalize_rewards
from lightrft.algorithms.moments import (
    Moments,
    PairedMoments,
    join_moments,
    moments_of,
    paired_moments,
)
from lightrft.algorithms.value import explained_variance


def test_clip_rewards_says_which_changed():
    clipped, changed = clip_rewards(torch.tensor([-3.0, 0.5, 2.0]), limit=2.0)
    assert clipped.tolist() == [-2.0, 0.5, 2.0]
    assert changed.tolist() == [True, False, False]
    with pytest.raises(ValueError, match="must be positive"):
        clip_rewards(torch.ones(1), limit=0.0)


def test_running_moments_of_nothing_one_and_constants_do_not_divide_by_zero():
    for rewards in ([], [3.0], [3.0, 3.0], [0.1] * 3, [1e6 + 0.1] * 7):
        moments = Moments().merge(moments_of(torch.tensor(rewards, dtype=torch.float64)))
        assert normalize_rewards(torch.tensor([2.0]), moments).item() == 2.0


def test_explained_variance_over_ranks_and_where_there_is_none(ragged):
    batch = ragged(4, rows=6)
    values, returns, mask = batch.tensors.values, batch.tensors.rewards, batch.tensors.mask

    def share(returns, mask):
        parts = [
            paired_moments(returns[rows], (returns - values)[rows], mask[rows])
            for rows in (slice(0, 3), slice(3, 6))
        ]
        return explained_variance(PairedMoments.of(join_moments(torch.stack(parts))))

    error = (batch.rewards - batch.values)[batch.mask]
    expected = 1 - error.var() / batch.rewards[batch.mask].var()
    assert share(returns, mask) == pytest.approx(expected)
    assert share(torch.full_like(returns, 0.3), mask) is None
    assert share(returns, torch.zeros_like(mask)) is None


@pytest.mark.parametrize("offset", [0.0, 1e7, -1e9])
def test_explained_variance_of_far_returns_keeps_its_digits(offset):
    """Returns of 1e7 +- 1, half of whose variance the values explain, in two parts of unequal
    means."""
    returns = offset + torch.tensor([[1.0, -1.0, 1.0, -1.0], [3.0, 1.0, 3.0, 1.0]]).double()
    errors = torch.tensor([[0.5, 0.5, -0.5, -0.5], [1.0, -1.0, 1.0, -1.0]]).double()
    mask = torch.ones(2, 4, dtype=torch.bool)
    rows = [paired_moments(returns[i], errors[i], mask[i]) for i in (0, 1)]
    expected = 1 - errors.var(correction=0) / (returns - offset).var(correction=0)
    found = explained_variance(PairedMoments.of(join_moments(torch.stack(rows))))
    assert found == pytest.approx(float(expected), rel=1e-6)
