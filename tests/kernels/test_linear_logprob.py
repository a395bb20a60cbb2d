"""linear_logprob against a slow float64 reference: values, all gradients, and refusals."""

import math

import pytest
import torch
from tests.kernels.logprob_world import (
    check_logprob,
    check_loss,
    float64_program,
    make_inputs,
    weighted,
)

from lightrft.kernels import Workspace, linear_logprob

IMPLEMENTATIONS = ["reference", "chunked"]


def workspace_of(impl, columns=256):
    return Workspace(columns) if impl == "chunked" else None


by_every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@by_every_implementation
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1408])
def test_values_and_gradients_equal_float64(num_tokens, vocab, impl):
    leaves, targets, upstream = make_inputs(num_tokens, vocab)
    targets[3::7] = -100
    options = {"temperature": 0.7, "softcap": 4.0, "workspace": workspace_of(impl)}
    # One token has probability 1: no gradient but rounding.
    gradient = 1e-4 if vocab == 1 else 2e-6
    output = check_logprob(leaves, targets, upstream, impl=impl, gradient=gradient, **options)
    assert output.logprobs.dtype == torch.float32
    assert output.logprobs.shape == (num_tokens,)


@pytest.mark.parametrize("vocab", [32000, 50257, 128256, 151936, 152064, 262144])
def test_vocabularies_of_models(vocab):
    leaves, targets, upstream = make_inputs(3, vocab, size=8, has_bias=False)
    targets[0] = vocab - 1
    check_logprob(leaves, targets, upstream, value=5e-5, gradient=1e-5)


@by_every_implementation
def test_entropy_value_is_detached_and_none_is_none(impl):
    (hidden, weight, _), targets, _ = make_inputs(9, 50)
    value = linear_logprob(hidden, weight, targets, entropy="value", impl=impl)
    grad = linear_logprob(hidden, weight, targets, entropy="grad", impl=impl)
    assert not value.entropy.requires_grad
    assert grad.entropy.requires_grad
    assert torch.equal(value.entropy, grad.entropy)
    assert linear_logprob(hidden, weight, targets, impl=impl).entropy is None
    value.logprobs.sum().backward()
    assert hidden.grad is not None


@by_every_implementation
def test_all_rows_ignored_give_zeros_and_zero_gradients(impl):
    leaves, targets, upstream = make_inputs(12, 70)
    ignored = torch.full_like(targets, -100)
    check_logprob(leaves, ignored, upstream, impl=impl, value=1e-30, gradient=1e-30)


@by_every_implementation
def test_ignored_rows_do_not_change_the_others(impl):
    (hidden, weight, _), targets, upstream = make_inputs(20, 90)
    masked = targets.clone()
    masked[::2] = 5
    output = linear_logprob(hidden, weight, masked, ignore_index=5, entropy="grad", impl=impl)
    kept = masked != 5
    alone = linear_logprob(hidden[kept], weight, masked[kept], entropy="grad", impl=impl)
    assert torch.equal(output.logprobs[kept], alone.logprobs)
    assert torch.equal(output.entropy[kept], alone.entropy)
    assert not output.logprobs[~kept].any()
    (gradient,) = torch.autograd.grad(
        weighted((output.logprobs, output.entropy), upstream), [hidden]
    )
    assert not gradient[~kept].any()
    assert gradient[kept].any(dim=1).all()


@by_every_implementation
@pytest.mark.parametrize("shift", [1e4, -1e4, -150.0])
def test_shifted_logits_stay_finite_and_right(impl, shift):
    leaves, targets, upstream = make_inputs(31, 700)
    leaves[2] = torch.full((700,), shift, requires_grad=True)
    # float32 logits near 1e4 are multiples of 2^-10; the result must not be worse than that.
    bounds = {"value": 2e-5, "gradient": 1e-5}
    check_logprob(leaves, targets, upstream, impl=impl, workspace=workspace_of(impl), **bounds)


def test_no_phantom_columns_when_the_last_chunk_is_short():
    # A row of very negative logits: a padded column with logit 0 would take all the mass.
    weight = torch.zeros(300, 4)
    bias = torch.full((300,), -200.0)
    output = linear_logprob(
        torch.ones(2, 4), weight, torch.tensor([0, 299]), bias=bias, workspace=Workspace(256)
    )
    assert torch.allclose(output.logprobs, torch.full((2,), -math.log(300)), atol=1e-5)


def test_gradient_of_a_near_certain_target_keeps_its_digits():
    # p = 1 - 1e-6: p - 1 must come out to a percent, not as 0.
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    hidden = torch.tensor([[math.log(1e6)]])
    linear_logprob(hidden, weight, torch.tensor([0])).logprobs.sum().backward()
    assert weight.grad[0].item() == pytest.approx(1e-6 * math.log(1e6), rel=0.2)
    assert weight.grad[1].item() == pytest.approx(-1e-6 * math.log(1e6), rel=0.01)


@by_every_implementation
def test_bfloat16_inputs_are_computed_in_float32(impl):
    leaves, targets, upstream = make_inputs(64, 500, dtype=torch.bfloat16)
    check_logprob(leaves, targets, upstream, impl=impl, value=5e-5, gradient=3e-3)
    hidden, weight, bias = leaves
    naive = torch.log_softmax((hidden @ weight.T + bias).float(), -1)
    naive = naive.gather(1, targets[:, None]).squeeze(1)
    (exact, _), _, _ = float64_program(leaves, targets)
    assert (naive.double() - exact).abs().max() > 1e-3  # bf16 logits would be noticed


# Of the reference, autograd's own products are left to autocast.
@pytest.mark.parametrize("impl, num_exact", [("reference", 2), ("chunked", 4)])
def test_autocast_changes_neither_values_nor_gradients(impl, num_exact):
    (hidden, weight, _), targets, upstream = make_inputs(30, 200)

    def run():
        output = linear_logprob(hidden, weight, targets, entropy="grad", impl=impl)
        outputs = (output.logprobs, output.entropy)
        return *outputs, *torch.autograd.grad(weighted(outputs, upstream), (hidden, weight))

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, run()[:num_exact], plain))


def test_frozen_weight_and_frozen_hidden_get_no_gradient():
    (hidden, weight, bias), targets, upstream = make_inputs(17, 130)
    leaves = (hidden, weight, bias)
    full = linear_logprob(hidden, weight, targets, bias=bias)
    want = torch.autograd.grad((full.logprobs * upstream[0]).sum(), leaves)
    for frozen in range(3):
        inputs = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(leaves)]
        output = linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2])
        (output.logprobs * upstream[0]).sum().backward()
        for index, tensor in enumerate(inputs):
            if index == frozen:
                assert tensor.grad is None
            else:
                assert torch.equal(tensor.grad, want[index])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"impl": "cuda"}, "unknown impl 'cuda': expected one of auto, reference, chunked"),
        ({"entropy": "yes"}, "unknown entropy 'yes': expected one of none, value, grad"),
        ({"impl": "cublas"}, "impl='cublas' is not available here: it needs CUDA tensors"),
        ({"impl": "reference", "workspace": Workspace(8)}, "workspace=None"),
        ({"temperature": 0.0}, "temperature must be positive: got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive: got nan"),
        ({"softcap": -1.0}, "softcap must be positive or None: got -1.0"),
        ({"bias": torch.zeros(3)}, r"expected bias \[20\]: got \(3,\)"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    (hidden, weight, _), targets, _ = make_inputs(4, 20)
    with pytest.raises(ValueError, match=message):
        linear_logprob(hidden, weight, targets, **options)


def test_bad_tensors_are_refused():
    (hidden, weight, _), targets, _ = make_inputs(4, 20)
    with pytest.raises(ValueError, match=r"\(4, 24\) and \(20, 23\)"):
        linear_logprob(hidden, weight[:, :23], targets)
    with pytest.raises(ValueError, match=r"targets \[4\] int64: got \(3,\)"):
        linear_logprob(hidden, weight, targets[:3])
    with pytest.raises(ValueError, match="int32"):
        linear_logprob(hidden, weight, targets.int())
    with pytest.raises(ValueError, match=r"floating dtype: got torch\.int64"):
        linear_logprob(hidden, weight.long(), targets)
    with pytest.raises(ValueError, match="empty vocabulary"):
        linear_logprob(hidden, weight[:0], targets)
    with pytest.raises(ValueError, match="chunk_columns must be at least 1"):
        Workspace(0)
    for wrong in (20, -1):
        bad = targets.clone()
        bad[2] = wrong
        with pytest.raises(ValueError, match=rf"targets must lie in \[0, 20\).*got {wrong}"):
            linear_logprob(hidden, weight, bad)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "loss"])
def test_padding_and_forbidden_tokens_have_no_probability_and_no_gradient(impl, softcap):
    leaves, targets, upstream = make_inputs(9, 40)
    leaves[2] = leaves[2].detach().index_fill(0, torch.tensor([3, 17]), -math.inf).requires_grad_()
    targets = targets % 13 + 4
    program = {"temperature": 0.7, "softcap": softcap, "num_tokens": 31}
    if impl == "loss":
        check_loss(leaves, targets, upstream, **program)
    else:
        check_logprob(leaves, targets, upstream, impl=impl, gradient=1e-5, **program)
