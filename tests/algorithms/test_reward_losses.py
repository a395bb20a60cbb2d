"""Losses of reward models at their bounds; `tests/stages/reward` has their formulas."""

import math

import pytest
import torch

from lightrft.algorithms.reward_losses import bradley_terry, rao_kupper, scaled_bradley_terry

NO_TIE = torch.zeros(2, dtype=torch.bool)
PAIR_LOSSES = [bradley_terry, scaled_bradley_terry, rao_kupper]


def probability(loss, difference, *, is_tie=False):
    given = torch.tensor([difference], dtype=torch.float64)
    return math.exp(-loss(given, torch.tensor([is_tie])).item())


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_differences_that_would_overflow_an_exponential_have_a_loss(loss):
    differences = torch.tensor([-200.0, 200.0], requires_grad=True)
    values = loss(differences, NO_TIE)
    values.sum().backward()
    assert values.isfinite().all()
    assert differences.grad.isfinite().all()
    assert values[0] > 199
    assert values[1] < 1e-6


@pytest.mark.parametrize("difference", [-2.0, -0.1, 0.0, 1.3])
@pytest.mark.parametrize("width", [0.1, 0.5, 2.0])
def test_preference_reverse_and_tie_add_up_to_1(difference, width):
    from functools import partial

    loss = partial(rao_kupper, tie_width=width)
    total = sum(probability(loss, d) for d in (difference, -difference))
    assert total + probability(loss, difference, is_tie=True) == pytest.approx(1.0, abs=1e-12)
    tied = [probability(loss, d, is_tie=True) for d in (0.0, 0.5, -0.5, 3.0)]
    assert tied[0] > tied[1] > tied[3]
    assert tied[2] == pytest.approx(tied[1])
    with pytest.raises(ValueError, match="tie_width must be positive: got 0"):
        rao_kupper(NO_TIE.double(), NO_TIE, tie_width=0)
