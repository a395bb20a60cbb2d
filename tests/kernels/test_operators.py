"""linear_logprob at home in torch: compilers, checkpoints, second derivatives, settings."""

import pytest
import torch
from tests.host_waits import HostWaits
from tests.kernels.logprob_world import make_inputs
from torch.utils.checkpoint import checkpoint

from lightrft.kernels import linear_logprob, linear_policy_loss
from lightrft.kernels.logprob import policy_loss
from lightrft.kernels.logprob.passes import wide_product
from lightrft.kernels.logprob.rows import select_rows

pytestmark = pytest.mark.shard("strategies")


def leaves_and_targets(dtype=torch.float32):
    leaves, targets, _ = make_inputs(20, 100, dtype=dtype)
    targets[3] = -100
    return (*leaves, targets)


def summed(logprobs, entropy, rows):
    """Return the sum as a loss, with its gradient."""
    return logprobs.sum(), torch.ones_like(logprobs), None


def logprobs_and_entropy(hidden, weight, bias, targets):
    output = linear_logprob(hidden, weight, targets, bias=bias, temperature=0.7, entropy="grad")
    return output.logprobs, output.entropy


def run(function, inputs):
    """Both outputs and the gradients of a loss that is not linear in them."""
    logprobs, entropy = function(*inputs)
    loss = (logprobs**2).sum() + (entropy * logprobs.detach()).sum()
    return logprobs, entropy, *torch.autograd.grad(loss, inputs[:3])


def assert_same(values, expected):
    for value, reference in zip(values, expected, strict=True):
        assert torch.allclose(value, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph_forward_and_backward(dynamic):
    inputs = leaves_and_targets()
    compiled = torch.compile(
        logprobs_and_entropy, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    assert_same(run(compiled, inputs), run(logprobs_and_entropy, inputs))
    # Positive control: the compiled function follows its inputs.
    changed = (inputs[0] * 2, *inputs[1:])
    with pytest.raises(AssertionError):
        assert_same(run(compiled, changed), run(logprobs_and_entropy, inputs))


@pytest.mark.slow
def test_compiles_in_one_graph_with_inductor():
    inputs = leaves_and_targets()
    compiled = torch.compile(logprobs_and_entropy, fullgraph=True)
    assert_same(run(compiled, inputs), run(logprobs_and_entropy, inputs))


def test_a_checkpoint_that_does_not_reenter_recomputes_it():
    inputs = leaves_and_targets()

    def recomputed(*arguments):
        return checkpoint(logprobs_and_entropy, *arguments, use_reentrant=False)

    assert_same(run(recomputed, inputs), run(logprobs_and_entropy, inputs))


def test_a_checkpoint_of_a_loss_inside_recomputes_it():
    hidden, weight, _, targets = leaves_and_targets()

    def loss_of(hidden, weight):
        return linear_policy_loss(hidden, weight, targets, summed).loss

    want = torch.autograd.grad(loss_of(hidden, weight), (hidden, weight))
    loss = checkpoint(loss_of, hidden, weight, use_reentrant=False)
    assert_same(torch.autograd.grad(loss, (hidden, weight)), want)


def operator_arguments(entropy):
    hidden, weight, bias, targets = leaves_and_targets()
    options = (0.7, 5.0, -100, entropy, "auto", 64, None)
    forward = (hidden, weight, bias, targets, *options)
    results = [tensor.detach() for tensor in torch.ops.lightrft.linear_logprob(*forward)]
    upstream = (torch.randn(20), torch.randn(20) if entropy == "grad" else None)
    inputs = [tensor.detach() for tensor in (hidden, weight, bias, targets)]
    return forward, (*upstream, *inputs, *results, [True, True, True], *options)


@pytest.mark.parametrize("entropy", ["grad", "none"])
def test_operators_pass_torchs_own_checks(entropy):
    forward, backward = operator_arguments(entropy)
    torch.library.opcheck(torch.ops.lightrft.linear_logprob.default, forward)
    torch.library.opcheck(torch.ops.lightrft.linear_logprob_backward.default, backward)


@pytest.mark.parametrize("inside", [False, True])
def test_second_derivatives_are_refused_also_beside_another_term(inside):
    hidden, weight, _, targets = leaves_and_targets()
    if inside:
        loss = linear_policy_loss(hidden, weight, targets, summed).loss
    else:
        loss = linear_logprob(hidden, weight, targets).logprobs.sum()
    (gradient,) = torch.autograd.grad(loss + (hidden**3).sum(), hidden, create_graph=True)
    assert torch.isfinite(gradient).all()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradient.sum().backward()


def test_vmap_is_refused_with_what_to_do():
    _, weight, _, targets = leaves_and_targets()

    def logprobs(hidden):
        return linear_logprob(hidden, weight.detach(), targets).logprobs

    with pytest.raises(RuntimeError, match=r"batch of 3.*hidden\.flatten\(0, 1\)"):
        torch.vmap(logprobs)(torch.randn(3, 20, 24))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_products_keep_their_digits_whatever_the_program_allows(precision):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(300, 1024, generator=generator)
    right = torch.randn(1024, 300, generator=generator)
    exact = left.double() @ right.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        product = wide_product(left, right)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert (product - exact).norm() < 2e-6 * exact.norm()


@pytest.mark.parametrize("is_static", [False, True])
def test_rows_are_chosen_with_one_transfer_or_none(is_static):
    mask = torch.tensor([True, False, True, True])
    values = torch.tensor([4, -100, 0, 2])
    with HostWaits() as watch:
        chosen = select_rows(mask, values, 5, is_static=is_static)
    assert watch.names == ([] if is_static else ["tolist"])
    assert torch.equal(chosen.place(chosen.take(values + 1.0), 9.0), torch.tensor([5.0, 9, 1, 3]))
    if not is_static:
        assert (chosen.smallest, chosen.largest) == (0, 4)
        assert chosen.index.tolist() == [0, 2, 3]


def test_values_are_asserted_where_nothing_may_be_transferred():
    mask = torch.tensor([True, False])
    with pytest.raises(RuntimeError, match=r"targets must lie in \[0, 5\)"):
        select_rows(mask, torch.tensor([5, 0]), 5, is_static=True)
    select_rows(mask, torch.tensor([4, 7]), 5, is_static=True)


@pytest.mark.parametrize("ignored, waits", [(-100, ["tolist"]), (None, [])])
def test_a_loss_inside_waits_once_for_targets_that_may_be_ignored_and_else_never(ignored, waits):
    with HostWaits() as watch:
        active = policy_loss.active_tokens(torch.tensor([4, 0, 2]), 5, ignored, is_device=True)
    assert watch.names == waits
    assert active.tolist() == [0, 1, 2]
    for is_device in (True, False):
        with pytest.raises((RuntimeError, ValueError), match=r"targets must lie in \[0, 3\)"):
            policy_loss.active_tokens(torch.tensor([4]), 3, ignored, is_device=is_device)
