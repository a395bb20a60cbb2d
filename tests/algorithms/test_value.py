"""The critic's loss."""

import numpy as np
import pytest
import torch

from lightrft.algorithms.aggregation import aggregate
from lightrft.algorithms.value import clipped_value_loss

OLD = torch.tensor([[0.5, 0.4, 0.3, 0.2]]).double()
RETURNS = torch.tensor([[0.50279, 0.59832, 0.756, 1.0]]).double()
ALL = torch.ones(1, 4, dtype=torch.bool)


def test_worked_numbers():
    values = torch.tensor([[0.9, 0.1, 0.5, 0.9]]).double().requires_grad_(True)
    tokens = clipped_value_loss(values, OLD, RETURNS, ALL, clip=0.2)
    expected = [0.157775, 0.248323, 0.065536, 0.36]
    assert (2 * tokens[0]).tolist() == pytest.approx(expected, abs=1e-6)
    loss = aggregate(tokens, ALL, "token-mean", 4.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.103954, abs=1e-6)
    expected = [0.099302, -0.12458, -0.064, 0.0]
    assert values.grad[0].tolist() == pytest.approx(expected, abs=1e-6)
    plain = clipped_value_loss(values, OLD, RETURNS, ALL, clip=None).mean()
    assert plain.item() == pytest.approx(0.060204, abs=1e-6)


def test_equals_numpy_and_ignores_the_padding(ragged):
    batch = ragged(7)
    mask = batch.tensors.mask
    values, old, returns = (
        torch.where(mask, torch.tensor(x), float("nan"))
        for x in (batch.values, batch.advantages, batch.rewards)
    )
    values.requires_grad_(True)
    tokens = clipped_value_loss(values, old, returns, mask, clip=0.3)
    bounded = batch.advantages + np.clip(batch.values - batch.advantages, -0.3, 0.3)
    expected = np.maximum((batch.values - batch.rewards) ** 2, (bounded - batch.rewards) ** 2) / 2
    np.testing.assert_allclose(tokens.detach().numpy(), expected * batch.mask, atol=1e-12)
    (grad,) = torch.autograd.grad(tokens.sum(), values)
    assert torch.isfinite(grad).all()
    assert (grad[~mask] == 0).all()


def test_a_clip_of_zero_is_an_error():
    with pytest.raises(ValueError, match="None to switch it off"):
        clipped_value_loss(OLD, OLD, RETURNS, ALL, clip=0.0)


def test_numbers_for_other_tokens_are_refused():
    square, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"one number per token.*got \(2,\)"):
        clipped_value_loss(square, square, torch.zeros(2), mask)  # would be broadcast
