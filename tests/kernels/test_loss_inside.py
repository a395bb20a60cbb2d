"""The loss inside the output layer on a CPU, and what chooses how it is computed."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import linear_logprob, linear_policy_loss
from lightrft.kernels.logprob import stored_logits
from lightrft.kernels.logprob.policy_loss import plan_loss
from lightrft.kernels.logprob.products import cpu_multiplies_bfloat16, split_product
from lightrft.kernels.logprob.rows import RunningRows
from lightrft.kernels.logprob.selection import automatic_choice

NUM_TOKENS, VOCAB, SIZE = 37, 5000, 16


def make_inputs(spread=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, SIZE, generator=generator)
    weight = torch.randn(VOCAB, SIZE, generator=generator) * (spread / math.sqrt(SIZE))
    bias = torch.randn(VOCAB, generator=generator)
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    targets[5], targets[6] = targets[4], -100  # one twice, one ignored
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    return leaves, targets, torch.randn(2, NUM_TOKENS, generator=generator)


def slow(leaves, targets, upstream, *, temperature, softcap):
    """Loss and gradients of sum(u lp + v H), token by token in float64."""
    hidden, weight, bias = (leaf.detach().double().requires_grad_() for leaf in leaves)
    loss = torch.zeros((), dtype=torch.float64)
    for token, target in enumerate(targets.tolist()):
        if target == -100:
            continue
        logits = weight @ hidden[token] + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        law = torch.log_softmax(logits / temperature, 0)
        finite = law.masked_fill(law == -torch.inf, 0.0)
        loss = loss + upstream[0, token].double() * law[target]
        loss = loss - upstream[1, token].double() * (law.exp() * finite).sum()
    return loss, torch.autograd.grad(loss, (hidden, weight, bias))


def weighted(upstream):
    def token_loss(logprobs, entropy, rows):
        u, v = upstream[:, rows].to(logprobs.dtype)
        loss = (u * logprobs).sum() + (v * entropy).sum()
        return loss, u, v if v.any() else None

    return token_loss


def distance(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [None, 9])
def test_loss_and_gradients_equal_float64(entropy, softcap, temperature, chunk_tokens):
    leaves, targets, upstream = make_inputs()
    if entropy != "grad":
        upstream[1] = 0
    options = {"temperature": temperature, "softcap": softcap}
    loss, wanted = slow(leaves, targets, upstream, **options)
    output = linear_policy_loss(
        *leaves[:2],
        targets,
        weighted(upstream),
        bias=leaves[2],
        entropy=entropy,
        chunk_tokens=chunk_tokens,
        logits_budget_bytes=None if chunk_tokens is None else 90_000,
        **options,
    )
    assert float(output.loss) == pytest.approx(float(loss), rel=2e-5)
    assert (output.entropy is None) == (entropy == "none")
    for found, exact in zip(torch.autograd.grad(output.loss, leaves), wanted, strict=True):
        assert distance(found, exact) < 5e-6


@pytest.mark.parametrize("spread", [9.0, 3000.0])
def test_large_logits_and_excluded_tokens(spread):
    leaves, targets, upstream = make_inputs(spread)
    upstream[1] = 0
    with torch.no_grad():
        leaves[2][torch.arange(0, VOCAB, 7)] = -torch.inf
    targets = torch.where(targets % 7 == 0, targets + 1, targets).clamp(max=VOCAB - 2)
    loss, wanted = slow(leaves, targets, upstream, temperature=1.0, softcap=None)
    output = linear_policy_loss(
        *leaves[:2], targets, weighted(upstream), bias=leaves[2], entropy="value"
    )
    assert float(output.loss) == pytest.approx(float(loss), rel=1e-4)
    assert bool(output.entropy.isfinite().all())
    # The rounding of a logit of 10^4 is 1e-3, and that of its probability, too.
    bound = 1e-5 if spread < 100 else 5e-3
    for found, exact in zip(torch.autograd.grad(output.loss, leaves), wanted, strict=True):
        assert distance(found, exact) < bound


def test_a_near_certain_target_keeps_the_digits_of_its_gradient():
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[12.0], [0.0], [-1.0]], requires_grad=True)
    targets = torch.tensor([0])
    law = torch.log_softmax(weight.detach().double()[:, 0], 0)
    output = linear_policy_loss(
        hidden, weight, targets, lambda lp, _, rows: (lp.sum(), torch.ones(1), None), entropy="none"
    )
    (found,) = torch.autograd.grad(output.loss, weight)
    assert float(found[0]) == pytest.approx(float(-law[0].expm1()), rel=1e-2)


def test_the_comparison_sees_a_lost_target_entry(monkeypatch):
    """Positive control: without clearing the targets' probabilities they count twice."""
    leaves, targets, upstream = make_inputs()
    upstream[1] = 0
    _, wanted = slow(leaves, targets, upstream, temperature=1.0, softcap=None)
    monkeypatch.setattr(stored_logits.StoredLogits, "clear_targets", lambda *args: None)
    output = linear_policy_loss(
        *leaves[:2], targets, weighted(upstream), bias=leaves[2], entropy="none"
    )
    assert distance(torch.autograd.grad(output.loss, leaves)[1], wanted[1]) > 1e-4


def test_gradients_are_handed_over_once():
    leaves, targets, upstream = make_inputs()
    output = linear_policy_loss(*leaves[:2], targets, weighted(upstream))
    torch.autograd.grad(output.loss, leaves[0], retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated before"):
        output.loss.backward()


def test_a_gradient_for_an_entropy_that_has_none_is_refused():
    leaves, targets, upstream = make_inputs()
    with pytest.raises(ValueError, match="pass entropy='grad', got 'value'"):
        linear_policy_loss(*leaves[:2], targets, weighted(upstream), entropy="value")


@pytest.mark.parametrize("rises", [False, True])
def test_running_statistics_equal_those_of_all_columns(rises):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20, 300, generator=generator)
    if rises:
        logits += torch.arange(300) / 4  # each block far above the one before
    logits[3, :100] = -torch.inf
    targets = torch.randint(0, 300, (20,), generator=generator)
    exact = torch.log_softmax(logits.double(), 1)
    running, changes = RunningRows.empty(targets, torch.float32), []
    for start in range(0, 300, 50):
        block = logits[:, start : start + 50].clone()
        changes.append(running.add(block, start, scratch=torch.empty_like(block)))
    found = running.statistics()
    assert all(changes[1:]) if rises else sum(changes) < 4
    logprobs, entropy = exact.gather(1, targets[:, None])[:, 0], -(exact.exp() * exact).nansum(1)
    assert torch.allclose(found.logprobs.double(), logprobs, atol=2e-5)
    assert torch.allclose(found.entropy.double(), entropy, atol=2e-5)


def test_three_parts_hold_a_float32_weight():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    hidden = torch.randn(64, 33, generator=generator).bfloat16()
    exact = weight.double() @ hidden.double()
    assert distance(split_product(weight, hidden), exact) < 5e-7
    assert distance(split_product(hidden.T, weight.T), exact.T) < 5e-7
    # Positive control: a weight that was rounded once.
    assert distance(split_product(weight, hidden, num_parts=1), exact) > 1e-3


def test_bfloat16_products_of_a_cpu_are_exact():
    before = torch.get_float32_matmul_precision()
    assert not cpu_multiplies_bfloat16()
    torch.set_float32_matmul_precision("medium")
    try:
        if not cpu_multiplies_bfloat16():
            pytest.skip("this CPU has no instructions for bfloat16 products")
        (hidden, weight, _), targets, upstream = make_inputs(dtype=torch.bfloat16)
        targets = targets.clamp(min=0)
        exact = torch.log_softmax(hidden.double() @ weight.double().T, 1)
        exact = exact.gather(1, targets[:, None]).squeeze(1)
        found = linear_logprob(hidden, weight, targets).logprobs
        assert (found.double() - exact).abs().max() < 5e-5
        # Of float32 operands nothing is rounded, whatever the program allows.
        wide = linear_logprob(hidden.float() / 3, weight.float(), targets).logprobs
        exact = torch.log_softmax((hidden.float() / 3).double() @ weight.double().T, 1)
        exact = exact.gather(1, targets[:, None]).squeeze(1)
        assert (wide.double() - exact).abs().max() < 5e-5
        upstream[1] = 0
        inside = linear_policy_loss(hidden, weight, targets, weighted(upstream), entropy="none")
        none = torch.zeros(VOCAB)
        _, wanted = slow((hidden, weight, none), targets, upstream, temperature=1.0, softcap=None)
        for got, want in zip(
            torch.autograd.grad(inside.loss, (hidden, weight)), wanted[:2], strict=True
        ):
            assert distance(got, want) < 6e-3
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_7b_loss_takes_three_products_within_the_default_budget():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        hidden = torch.empty(8192, 3584, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(152064, 3584, dtype=torch.bfloat16, device="cuda")
    chunk_tokens, budget_bytes = plan_loss(8192, hidden, weight)
    # The logits of a chunk are all stored: none are computed twice.
    assert chunk_tokens * 152064 * 4 <= budget_bytes == 2**31
    assert plan_loss(8192, hidden, weight, chunk_tokens=4096) == (4096, 2**31)


def test_auto_is_a_fixed_choice():
    from torch._subclasses import FakeTensorMode

    def of(hidden_dtype, weight_dtype, size, device="cuda"):
        with FakeTensorMode():
            hidden = torch.empty(64, size, dtype=hidden_dtype, device=device)
            weight = torch.empty(999, size, dtype=weight_dtype, device=device)
            return automatic_choice(hidden, weight)

    bf16, fp32 = torch.bfloat16, torch.float32
    assert of(fp32, fp32, 64, "cpu") == "chunked"
    assert of(bf16, fp32, 4096) == "cublas"
    assert of(fp32, fp32, 4096) == "chunked"
    assert of(bf16, bf16, 4096) == "cublas"
    assert of(bf16, bf16, 896) == "triton"
    assert plan_loss(700, torch.empty(700, 64), torch.empty(9999, 64)) == (700, 700 * 9999 * 4)
