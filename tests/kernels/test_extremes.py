"""linear_logprob against float64 where numbers are extreme: within its bounds, or a refusal."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import linear_logprob, linear_policy_loss


def float64_program(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None):
    """All logits in float64, and the largest finite one: (logprobs, entropies, size)."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = torch.log_softmax(logits, 1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    entropies = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(1)
    size = logits.detach()[logits.detach().isfinite()].abs().max().item()
    return logprobs, entropies, size


def make_inputs(num_tokens=24, vocab=400, size=48, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, size, generator=generator).to(dtype)
    weight = (torch.randn(vocab, size, generator=generator) * (spread / math.sqrt(size))).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    upstream = torch.randn(2, num_tokens, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def check(hidden, weight, targets, upstream, *, gradient_bound=5e-6, **options):
    output = linear_logprob(hidden, weight, targets, entropy="grad", **options)
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs, entropies, size = float64_program(*doubles, targets, **options)
    # A float32 logit of size z is off by about z * 2^-24, and so is what is computed from it.
    bound = 5e-5 * max(1.0, size / 50)
    assert (output.logprobs.double() - logprobs).abs().max() < bound
    assert (output.entropy.double() - entropies).abs().max() < 10 * bound
    got = torch.autograd.grad(
        (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum(),
        (hidden, weight),
    )
    want = torch.autograd.grad(
        (logprobs * upstream[0]).sum() + (entropies * upstream[1]).sum(), doubles
    )
    for value, reference in zip(got, want, strict=True):
        assert (value.double() - reference).norm() < max(gradient_bound, bound) * reference.norm()


@pytest.mark.parametrize("temperature", [0.01, 0.1, 10.0])
@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
def test_temperatures_and_softcaps(temperature, softcap):
    check(*make_inputs(), temperature=temperature, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
def test_a_loss_inside_at_a_temperature_of_one_hundredth(softcap):
    hidden, weight, targets, upstream = make_inputs()

    def token_loss(logprobs, entropy, rows):
        loss = (logprobs * upstream[0][rows]).sum() + (entropy * upstream[1][rows]).sum()
        return loss, upstream[0][rows], upstream[1][rows]

    options = {"temperature": 0.01, "softcap": softcap}
    output = linear_policy_loss(hidden, weight, targets, token_loss, **options)
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs, entropies, size = float64_program(*doubles, targets, **options)
    bound = 5e-5 * max(1.0, size / 50)
    assert (output.logprobs.double() - logprobs).abs().max() < bound
    assert (output.entropy.double() - entropies).abs().max() < 10 * bound
    loss = (logprobs * upstream[0]).sum() + (entropies * upstream[1]).sum()
    got = torch.autograd.grad(output.loss, (hidden, weight))
    for value, reference in zip(got, torch.autograd.grad(loss, doubles), strict=True):
        assert (value.double() - reference).norm() < bound * reference.norm()


@pytest.mark.parametrize("spread", [1e-4, 30.0, 3e3])
def test_flat_and_steep_logits(spread):
    # The steepest are about 1e4 in size.
    check(*make_inputs(spread=spread))


@pytest.mark.parametrize("size", [9, 100, 896, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_sizes(size, dtype):
    inputs = make_inputs(num_tokens=8, vocab=130, size=size, dtype=dtype)
    check(*inputs, gradient_bound=5e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize(("vocab", "padding"), [(50257, 47), (128256, 64), (151936, 128)])
def test_padded_vocabularies(vocab, padding):
    inputs = make_inputs(num_tokens=3, vocab=vocab + padding, size=8)
    inputs[2].clamp_(max=vocab - 1)
    bias = torch.zeros(vocab + padding)
    bias[vocab:] = -torch.inf
    check(*inputs, gradient_bound=1e-5, bias=bias)


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e4])
def test_float16_gradients_of_any_size(size):
    hidden, weight, targets, upstream = make_inputs(dtype=torch.float16)
    output = linear_logprob(hidden, weight, targets)
    got = torch.autograd.grad((output.logprobs * upstream[0] * size).sum(), (hidden, weight))
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs, _, _ = float64_program(*doubles, targets)
    want = torch.autograd.grad((logprobs * upstream[0] * size).sum(), doubles)
    for value, reference in zip(got, want, strict=True):
        rounding = (reference.half().double() - reference).norm()
        if reference.half().isfinite().all():
            assert (value.double() - reference).norm() < 1.1 * rounding + 1e-6 * reference.norm()


@pytest.mark.parametrize("upstream", [1.0, 2.0**16])
def test_a_float16_loss_inside_waits_for_its_scale(upstream):
    hidden, weight, targets, _ = make_inputs(dtype=torch.float16)
    share = 2.0**-24  # of one token in a large mini-batch

    def token_loss(logprobs, entropy, rows):
        return logprobs.sum() * share, torch.full_like(logprobs, share), None

    loss = linear_policy_loss(hidden, weight, targets, token_loss).loss
    got = torch.autograd.grad(loss * upstream, (hidden, weight))
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs, _, _ = float64_program(*doubles, targets)
    want = torch.autograd.grad(logprobs.sum() * share * upstream, doubles)
    for value, reference in zip(got, want, strict=True):
        rounding = (reference.half().double() - reference).norm()
        assert (value.double() - reference).norm() < 1.1 * rounding + 1e-6 * reference.norm()
