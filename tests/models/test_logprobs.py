"""Logprobs and entropy from logits: float32, checked shapes."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.models import entropy_from_logits, logprobs_from_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_equal_to_float64(dtype, temperature):
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 40) * 4).to(dtype)
    targets = torch.randint(0, 40, (3, 5))
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    logprobs = logprobs_from_logits(logits, targets, temperature=temperature)
    assert logprobs.dtype == torch.float32
    expected = log_p.gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(logprobs.double(), expected, atol=2e-5, rtol=0)
    entropy = entropy_from_logits(logits, temperature=temperature)
    assert torch.allclose(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=2e-5, rtol=0)


def test_flat_logits_have_the_entropy_of_a_uniform_choice():
    assert entropy_from_logits(torch.full((1, 7), -1e4)).item() == pytest.approx(math.log(7))


def test_a_token_of_probability_zero_adds_nothing_to_the_entropy():
    logits = torch.tensor([[1.0, 1.0, 1.0, -torch.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    assert entropy.item() == pytest.approx(math.log(3))
    (grad,) = torch.autograd.grad(
        entropy.sum() + logprobs_from_logits(logits, torch.tensor([0])), logits
    )
    assert grad[0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0], abs=1e-6)


def test_misaligned_shapes_are_an_error_not_a_broadcast():
    logits = torch.zeros(2, 5, 9)
    with pytest.raises(ValueError, match=r"got logits \(2, 5, 9\) and targets \(2, 4\)"):
        logprobs_from_logits(logits, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature must be positive: got 0"):
        logprobs_from_logits(logits, torch.zeros(2, 5, dtype=torch.int64), temperature=0)
