"""The critic's loss."""

import numpy as np
import pytest
import torch

from lightrft.algorithms.value import clipped_value_loss


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


def test_a_clip_of_zero_and_numbers_for_other_tokens_are_refused():
    square, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="None to switch it off"):
        clipped_value_loss(square, square, square, mask, clip=0.0)
    with pytest.raises(ValueError, match=r"one number per token.*got \(2,\)"):
        clipped_value_loss(square, square, torch.zeros(2), mask)  # would be broadcast
