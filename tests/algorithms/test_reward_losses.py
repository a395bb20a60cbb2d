"""Losses of reward models: worked numbers, finite differences, and what they say of ties."""

import math

import pytest
import torch

from lightrft.algorithms.reward_losses import (
    binary_cross_entropy,
    bradley_terry,
    rao_kupper,
    scaled_bradley_terry,
    squared_error,
)

CHOSEN = torch.tensor([1.2, -0.3], dtype=torch.float64)
REJECTED = torch.tensor([0.5, 0.4], dtype=torch.float64)
NO_TIE = torch.zeros(2, dtype=torch.bool)
PAIR_LOSSES = [bradley_terry, scaled_bradley_terry, rao_kupper]


def probability(loss, difference, *, is_tie=False):
    given = torch.tensor([difference], dtype=torch.float64)
    return math.exp(-loss(given, torch.tensor([is_tie])).item())


def test_worked_numbers():
    differences = CHOSEN - REJECTED
    assert bradley_terry(differences, NO_TIE).mean().item() == pytest.approx(
        0.7531860489, abs=1e-10
    )
    margins = torch.tensor([0.5, 0.0], dtype=torch.float64)
    found = bradley_terry(differences - margins, NO_TIE).mean().item()
    assert found == pytest.approx(0.8506624591, abs=1e-10)


def test_the_scaled_loss_is_the_cross_entropy_of_scaled_scores():
    logits = torch.stack([CHOSEN, REJECTED], dim=1) / 0.07
    expected = -logits.log_softmax(-1)[:, 0]
    torch.testing.assert_close(scaled_bradley_terry(CHOSEN - REJECTED, NO_TIE), expected)
    halved = scaled_bradley_terry(CHOSEN - REJECTED, NO_TIE, scale=0.5)
    torch.testing.assert_close(halved, bradley_terry((CHOSEN - REJECTED) / 2, NO_TIE))


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


@pytest.mark.parametrize(
    "loss, lost", [(bradley_terry, 1.1031860489), (scaled_bradley_terry, 10.0000453989)]
)
def test_a_tie_pulls_scores_together(loss, lost):
    tie = torch.ones(2, dtype=torch.bool)
    differences = CHOSEN - REJECTED  # 0.7 and -0.7
    assert loss(differences, tie).tolist() == pytest.approx([0.007, 0.007], abs=1e-15)
    assert loss(differences, tie, tie_coef=0.02).tolist() == pytest.approx(
        [0.014, 0.014], abs=1e-15
    )
    # The second is a preference: log(1 + exp(0.7)), or log(1 + exp(10)) of scaled scores.
    values = loss(differences, torch.tensor([True, False]))
    assert values.tolist() == pytest.approx([0.007, lost], abs=1e-10)


def test_a_tie_without_width_is_refused():
    with pytest.raises(ValueError, match="tie_width must be positive: got 0"):
        rao_kupper(CHOSEN, NO_TIE, tie_width=0)


def test_labels_are_compared_with_scores():
    labels = torch.tensor([1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(
        squared_error(CHOSEN, labels), torch.tensor([0.04, 0.09], dtype=torch.float64)
    )
    p = CHOSEN.sigmoid()
    expected = torch.stack([-p[0].log(), -(1 - p[1]).log()])
    torch.testing.assert_close(binary_cross_entropy(CHOSEN, labels), expected)


@pytest.mark.parametrize("loss", [*PAIR_LOSSES, squared_error, binary_cross_entropy])
def test_gradients_are_those_of_finite_differences(loss):
    torch.manual_seed(0)
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    other = torch.arange(6) % 2
    other = other.bool() if loss in PAIR_LOSSES else other.double()
    assert torch.autograd.gradcheck(lambda v: loss(v, other), values)
