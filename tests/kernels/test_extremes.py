"""linear_logprob against float64 where numbers are extreme: within its bounds, or a refusal."""

import pytest
import torch
from tests.kernels.logprob_world import check_logprob, check_loss, float64_program, make_inputs

from lightrft.kernels import linear_logprob, linear_policy_loss


def inputs(num_tokens=24, vocab=400, size=48, **more):
    return make_inputs(num_tokens, vocab, size=size, has_bias=False, **more)


@pytest.mark.parametrize("temperature", [0.01, 0.1, 10.0])
@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
def test_temperatures_and_softcaps(temperature, softcap):
    bounds = {"value": 5e-5, "gradient": 5e-5}
    check_logprob(*inputs(), temperature=temperature, softcap=softcap, **bounds)
    check_loss(*inputs(), temperature=temperature, softcap=softcap, **bounds)


@pytest.mark.parametrize("spread", [1e-4, 30.0, 3e3])
def test_flat_and_steep_logits(spread):
    # The steepest are about 1e4 in size.
    check_logprob(*inputs(spread=spread), value=5e-5, gradient=5e-5)


def assert_rounded_once(results, wanted):
    """Check float16 gradients where none overflows."""
    for result, exact in zip(results, wanted, strict=True):
        rounding = (exact.half().double() - exact).norm()
        if exact.half().isfinite().all():
            assert (result.double() - exact).norm() < 1.1 * rounding + 1e-6 * exact.norm()


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e4])
def test_float16_gradients_of_any_size(size):
    leaves, targets, upstream = inputs(dtype=torch.float16)
    output = linear_logprob(*leaves, targets)
    (logprobs, _), doubles, _ = float64_program(leaves, targets)
    assert_rounded_once(
        torch.autograd.grad((output.logprobs * upstream[0] * size).sum(), leaves),
        torch.autograd.grad((logprobs * upstream[0] * size).sum(), doubles),
    )


@pytest.mark.parametrize("upstream", [1.0, 2.0**16])
def test_a_float16_loss_inside_waits_for_its_scale(upstream):
    leaves, targets, _ = inputs(dtype=torch.float16)
    share = 2.0**-24  # of one token in a large mini-batch

    def token_loss(logprobs, entropy, rows):
        return logprobs.sum() * share, torch.full_like(logprobs, share), None

    loss = linear_policy_loss(*leaves, targets, token_loss).loss
    (logprobs, _), doubles, _ = float64_program(leaves, targets)
    assert_rounded_once(
        torch.autograd.grad(loss * upstream, leaves),
        torch.autograd.grad(logprobs.sum() * share * upstream, doubles),
    )
