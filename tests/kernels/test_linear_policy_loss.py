"""linear_policy_loss against the same loss of plain logprobs, differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import linear_logprob, linear_policy_loss


def make_inputs(num_tokens=53, vocab=300, size=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (3 / math.sqrt(size))
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets[::4] = -100
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    data = torch.randn(2, num_tokens, generator=generator)
    return leaves, targets, data


def clipped_loss(logprobs, entropy, advantages, old):
    """PPO's clipped surrogate with an entropy bonus, summed; its normaliser is 37."""
    ratio = torch.exp(logprobs - old)
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (-clipped - 0.01 * entropy).sum() / 37


def token_loss_of(function, calls):
    def token_loss(logprobs, entropy, rows):
        calls.append(rows)
        leaves = (logprobs.detach().requires_grad_(), entropy.detach().requires_grad_())
        loss = function(*leaves, rows)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return token_loss


def old_logprobs(leaves, targets, data):
    hidden, weight, bias = leaves
    with torch.no_grad():
        exact = linear_logprob(
            hidden, weight, targets, bias=bias, temperature=0.9, impl="reference"
        )
    return exact.logprobs + 0.2 * data[1]


def relative_error(value, expected):
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("budget", [0, 60_000, 2**31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_autograd(chunk_tokens, budget, dtype):
    leaves, targets, data = make_inputs(dtype=dtype)
    hidden, weight, bias = leaves
    old = old_logprobs(leaves, targets, data)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = linear_logprob(
        doubles[0],
        doubles[1],
        targets,
        bias=doubles[2],
        temperature=0.9,
        softcap=15.0,
        entropy="grad",
        impl="reference",
    )
    kept = targets != -100
    expected = clipped_loss(exact.logprobs[kept], exact.entropy[kept], data[0][kept], old[kept])
    want = torch.autograd.grad(3.0 * expected, doubles)

    calls: list[torch.Tensor] = []

    def loss_of_rows(logprobs, entropy, rows):
        return clipped_loss(logprobs, entropy, data[0][rows], old[rows])

    output = linear_policy_loss(
        hidden,
        weight,
        targets,
        token_loss_of(loss_of_rows, calls),
        bias=bias,
        temperature=0.9,
        softcap=15.0,
        chunk_tokens=chunk_tokens,
        logits_budget_bytes=budget,
    )
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(output.logprobs.double(), exact.logprobs, atol=1e-5)
    assert torch.allclose(output.entropy.double(), exact.entropy, atol=1e-5)
    assert torch.equal(torch.cat(calls), kept.nonzero().squeeze(1))
    assert all(len(rows) <= chunk_tokens for rows in calls)
    got = torch.autograd.grad(3.0 * output.loss, leaves)
    for value, reference, leaf in zip(got, want, leaves, strict=True):
        assert value.dtype == leaf.dtype
        # 16-bit gradients are rounded when they are stored and when 3.0 scales them, and those of
        # the logits before, on a CPU that multiplies bfloat16.
        assert relative_error(value, reference) < (5e-6 if dtype == torch.float32 else 6e-3)


def test_no_gradient_is_computed_where_none_is_needed():
    leaves, targets, data = make_inputs()

    def loss_of_rows(logprobs, entropy, rows):
        return (logprobs * data[0][rows]).sum() + 0 * entropy.sum()

    token_loss = token_loss_of(loss_of_rows, [])
    with torch.no_grad():
        silent = linear_policy_loss(leaves[0], leaves[1], targets, token_loss)
    assert not silent.loss.requires_grad
    frozen = leaves[1].detach()
    output = linear_policy_loss(leaves[0], frozen, targets, token_loss)
    assert output.loss.item() == silent.loss.item()
    output.loss.backward()
    plain = linear_logprob(leaves[0], frozen, targets).logprobs
    (want,) = torch.autograd.grad((plain * data[0]).sum(), leaves[0])
    assert relative_error(leaves[0].grad, want) < 5e-6


def test_all_tokens_ignored():
    leaves, targets, _ = make_inputs(num_tokens=6)
    output = linear_policy_loss(
        leaves[0], leaves[1], torch.full_like(targets, -100), token_loss_of(None, [])
    )
    assert output.loss.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(output.loss, leaves[:2]))


def test_wrong_shapes_are_refused():
    leaves, targets, _ = make_inputs(num_tokens=6)
    with pytest.raises(ValueError, match=r"got loss \(5,\) and gradients \[\(5,\)\]"):
        linear_policy_loss(
            leaves[0],
            leaves[1],
            targets[1:].repeat(2)[:6].clamp(min=0),
            lambda logprobs, entropy, rows: (logprobs[:5], logprobs[:5], None),
        )
    with pytest.raises(ValueError, match="chunk_tokens must be positive: got 0"):
        linear_policy_loss(leaves[0], leaves[1], targets, None, chunk_tokens=0)
