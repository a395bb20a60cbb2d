"""linear_policy_loss against the same loss of plain logprobs, differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import linear_logprob, linear_policy_loss
from lightrft.kernels.logprob.policy_loss import plan_row_chunks


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


def test_a_loss_over_sequences_sees_whole_sequences():
    leaves, targets, data = make_inputs(num_tokens=60)
    starts = torch.tensor([0, 9, 10, 31, 58])
    sequence = torch.repeat_interleave(torch.arange(5), torch.tensor([9, 1, 21, 27, 2]))
    old = old_logprobs(leaves, targets, data)

    def gspo_like(logprobs, rows):
        """Ratio of a sequence's mean logprob: it couples all tokens of a sequence."""
        sums = torch.zeros(5).index_add(0, sequence[rows], logprobs - old[rows])
        counts = torch.zeros(5).index_add(0, sequence[rows], torch.ones(len(rows)))
        present = counts > 0
        return -((sums[present] / counts[present]).exp() * (1 + starts[present])).sum()

    calls: list[torch.Tensor] = []
    token_loss = token_loss_of(
        lambda logprobs, entropy, rows: gspo_like(logprobs, rows) + 0 * entropy.sum(), calls
    )
    output = linear_policy_loss(
        leaves[0],
        leaves[1],
        targets,
        token_loss,
        bias=leaves[2],
        chunk_tokens=12,
        sequence_starts=starts,
    )
    for rows in calls:
        others = torch.cat([other for other in calls if other is not rows])
        assert not torch.isin(sequence[rows], sequence[others]).any()
    plain = linear_logprob(leaves[0], leaves[1], targets, bias=leaves[2])
    rows = (targets != -100).nonzero().squeeze(1)
    expected = gspo_like(plain.logprobs[rows], rows)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    got = torch.autograd.grad(output.loss, leaves)
    for value, reference in zip(got, torch.autograd.grad(expected, leaves), strict=True):
        assert relative_error(value, reference) < 5e-6


def test_chunks_of_rows():
    active = torch.tensor([0, 1, 2, 5, 6, 7, 8])
    assert [c.tolist() for c in plan_row_chunks(active, 9, 3, None)] == [[0, 1, 2], [5, 6, 7], [8]]
    starts = torch.tensor([0, 2, 3, 5])
    chunks = plan_row_chunks(active, 9, 3, starts)
    assert [c.tolist() for c in chunks] == [[0, 1, 2], [5, 6, 7, 8]]
    assert plan_row_chunks(active[:0], 9, 3, starts) == ()
    with pytest.raises(ValueError, match="ascend from 0"):
        plan_row_chunks(active, 9, 3, torch.tensor([1, 2]))


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
