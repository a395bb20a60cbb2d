"""The loss inside the output layer on a CPU, and what chooses how it is computed."""

import pytest
import torch
from tests.kernels.logprob_world import (
    check_loss,
    float64_program,
    make_inputs,
    relative_error,
    weighted,
    weighted_tokens,
)

from lightrft.kernels import linear_logprob, linear_policy_loss
from lightrft.kernels.logprob import blocks
from lightrft.kernels.logprob.policy_loss import plan_loss
from lightrft.kernels.logprob.selection import automatic_choice

NUM_TOKENS, VOCAB = 37, 5000


def inputs(spread=3.0, dtype=torch.float32):
    leaves, targets, upstream = make_inputs(NUM_TOKENS, VOCAB, size=16, spread=spread, dtype=dtype)
    targets[5], targets[6] = targets[4], -100  # one twice, one ignored
    return leaves, targets, upstream


@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens, budget", [(None, None), (9, 90_000), (7, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_float64(
    entropy, softcap, temperature, chunk_tokens, budget, dtype
):
    leaves, targets, upstream = inputs(dtype=dtype)
    if entropy != "grad":
        upstream[1] = 0
    how = {"entropy": entropy, "chunk_tokens": chunk_tokens, "logits_budget_bytes": budget}
    # 16-bit gradients are rounded when they are stored, and those of the logits before, on a CPU
    # that multiplies bfloat16.
    gradient = 5e-6 if dtype == torch.float32 else 6e-3
    program = {"temperature": temperature, "softcap": softcap}
    output = check_loss(
        leaves, targets, upstream, value=2e-5, gradient=gradient, how=how, **program
    )
    values, _, _ = float64_program(leaves, targets, **program)
    assert output.loss.item() == pytest.approx(weighted(values, upstream).item(), rel=2e-5)
    assert (output.entropy is None) == (entropy == "none")


def test_rows_that_count_are_handed_over_once_and_in_order():
    leaves, targets, upstream = inputs()
    calls = []

    def token_loss(logprobs, entropy, rows):
        calls.append(rows)
        return weighted_tokens(upstream)(logprobs, entropy, rows)

    output = linear_policy_loss(*leaves[:2], targets, token_loss, chunk_tokens=7)
    assert torch.equal(torch.cat(calls), (targets != -100).nonzero().squeeze(1))
    assert all(len(rows) <= 7 for rows in calls)
    once = torch.autograd.grad(output.loss, leaves[:2])
    again = linear_policy_loss(*leaves[:2], targets, token_loss, chunk_tokens=7)
    for thrice, plain in zip(torch.autograd.grad(3.0 * again.loss, leaves[:2]), once, strict=True):
        torch.testing.assert_close(thrice, 3.0 * plain)


@pytest.mark.parametrize("spread", [9.0, 3000.0])
def test_large_logits_and_excluded_tokens(spread):
    leaves, targets, upstream = inputs(spread)
    upstream[1] = 0
    with torch.no_grad():
        leaves[2][torch.arange(0, VOCAB, 7)] = -torch.inf
    targets = torch.where(targets % 7 == 0, targets + 1, targets).clamp(max=VOCAB - 2)
    output = check_loss(
        leaves, targets, upstream, value=2e-5, gradient=1e-5, how={"entropy": "value"}
    )
    assert bool(output.entropy.isfinite().all())


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
    leaves, targets, upstream = inputs()
    upstream[1] = 0
    monkeypatch.setattr(blocks.StoredLogits, "clear_targets", lambda *args: None)
    with pytest.raises(AssertionError):
        check_loss(leaves, targets, upstream, gradient=1e-4, how={"entropy": "none"})


def test_gradients_are_handed_over_once():
    leaves, targets, upstream = inputs()
    output = linear_policy_loss(*leaves[:2], targets, weighted_tokens(upstream))
    torch.autograd.grad(output.loss, leaves[0], retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated before"):
        output.loss.backward()


def test_a_gradient_for_an_entropy_that_has_none_is_refused():
    leaves, targets, upstream = inputs()
    with pytest.raises(ValueError, match="pass entropy='grad', got 'value'"):
        linear_policy_loss(*leaves[:2], targets, weighted_tokens(upstream), entropy="value")


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


def test_no_gradient_is_computed_where_none_is_needed():
    (hidden, weight, _), targets, upstream = inputs()
    upstream[1] = 0
    token_loss = weighted_tokens(upstream)
    with torch.no_grad():
        silent = linear_policy_loss(hidden, weight, targets, token_loss)
    assert not silent.loss.requires_grad
    frozen = weight.detach()
    output = linear_policy_loss(hidden, frozen, targets, token_loss)
    assert output.loss.item() == silent.loss.item()
    output.loss.backward()
    plain = linear_logprob(hidden, frozen, targets).logprobs
    (wanted,) = torch.autograd.grad((plain * upstream[0]).sum(), hidden)
    assert relative_error(hidden.grad, wanted) < 5e-6


def test_all_tokens_ignored():
    leaves, targets, _ = inputs()
    output = linear_policy_loss(*leaves[:2], torch.full_like(targets, -100), None)
    assert output.loss.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(output.loss, leaves[:2]))


def test_wrong_shapes_are_refused():
    (hidden, weight, _), targets, _ = inputs()
    with pytest.raises(ValueError, match=r"got loss \(5,\) and gradients \[\(5,\)\]"):
        linear_policy_loss(
            hidden, weight, targets, lambda logprobs, entropy, rows: (logprobs[:5],) * 2 + (None,)
        )
    with pytest.raises(ValueError, match="chunk_tokens must be positive: got 0"):
        linear_policy_loss(hidden, weight, targets, None, chunk_tokens=0)
