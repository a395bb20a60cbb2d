"""Reward shaping, running moments and the numbers that describe a step."""

import itertools

import numpy as np
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


def test_running_moments_equal_those_of_all_rewards_however_they_arrive():
    rewards = np.random.default_rng(0).normal(100.0, 0.5, 57)
    for cuts in ([57], [1, 2, 40, 57], [0, 20, 20, 57]):
        moments = Moments()
        for start, stop in itertools.pairwise([0, *cuts]):
            moments = moments.merge(moments_of(torch.tensor(rewards[start:stop])))
        assert moments.count == 57
        assert moments.mean == pytest.approx(rewards.mean(), rel=1e-12)
        assert moments.std(ddof=1) == pytest.approx(rewards.std(ddof=1), rel=1e-9)
    batch = torch.tensor(rewards[:5])
    np.testing.assert_allclose(
        normalize_rewards(batch, moments).numpy(), rewards[:5] / rewards.std(ddof=1)
    )
    np.testing.assert_allclose(
        normalize_rewards(batch, moments, minus_mean=True).numpy(),
        (rewards[:5] - rewards.mean()) / rewards.std(ddof=1),
        rtol=1e-6,
    )


def test_running_moments_of_nothing_one_and_constants_do_not_divide_by_zero():
    for rewards in ([], [3.0], [3.0, 3.0], [0.1] * 3, [1e6 + 0.1] * 7):
        moments = Moments().merge(moments_of(torch.tensor(rewards, dtype=torch.float64)))
        assert normalize_rewards(torch.tensor([2.0]), moments).item() == 2.0


def test_explained_variance_worked_and_over_ranks(ragged):
    values = torch.tensor([[0.5, 0.4, 0.3, 0.2]]).double()
    returns = torch.tensor([[0.50279, 0.59832, 0.756, 1.0]]).double()
    mask = torch.ones(1, 4, dtype=torch.bool)

    def share(values, returns, mask=mask):
        part = paired_moments(returns, returns - values, mask)
        return explained_variance(PairedMoments.of(part))

    assert share(values, returns) == pytest.approx(-1.518398, abs=1e-6)
    assert share(returns + 1, returns) == pytest.approx(1.0)
    assert share(values, torch.full((1, 4), 0.3)) is None
    assert share(values, returns, torch.zeros_like(mask)) is None
    batch = ragged(4, rows=6)
    arguments = [torch.tensor(x) for x in (batch.values, batch.rewards, batch.mask)]
    values, returns, mask = arguments
    parts = torch.stack(
        [
            paired_moments(returns[rows], (returns - values)[rows], mask[rows])
            for rows in (slice(0, 3), slice(3, 6))
        ]
    )
    error = (batch.rewards - batch.values)[batch.mask]
    expected = 1 - error.var() / batch.rewards[batch.mask].var()
    assert explained_variance(PairedMoments.of(join_moments(parts))) == pytest.approx(expected)


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
