"""linear_logprob against a slow float64 reference: values, all gradients, and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import Workspace, linear_logprob, linear_policy_loss

IMPLEMENTATIONS = ["reference", "chunked"]


def slow_logprob(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None):
    """float64 values and entropies, differentiable, one row at a time."""
    logprobs, entropies = [], []
    for row, target in zip(hidden.double(), targets.tolist(), strict=True):
        logits = weight.double() @ row
        if bias is not None:
            logits = logits + bias.double()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        if target == -100:
            logprobs.append(logits.sum() * 0)
            entropies.append(logits.sum() * 0)
            continue
        log_p = logits - torch.logsumexp(logits, 0)
        logprobs.append(log_p[target])
        entropies.append(-(log_p.exp() * log_p).sum())
    if not logprobs:
        nothing = hidden.double().sum(1) + 0 * (weight.sum() + (0 if bias is None else bias.sum()))
        return nothing, nothing
    return torch.stack(logprobs), torch.stack(entropies)


def make_inputs(num_tokens, vocab, *, size=24, seed=0, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (spread / math.sqrt(size))
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    upstream = torch.randn(2, num_tokens, generator=generator)
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    return (*leaves, targets, upstream)


def gradients(outputs, upstream, leaves):
    loss = sum((o.double() * g).sum() for o, g in zip(outputs, upstream, strict=True))
    return torch.autograd.grad(loss, leaves)


def relative_error(value, expected):
    scale = expected.double().norm()
    difference = (value.double() - expected.double()).norm()
    return float(difference / scale) if scale > 0 else float(difference)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1408])
def test_values_and_gradients_equal_float64(num_tokens, vocab, impl):
    hidden, weight, bias, targets, upstream = make_inputs(num_tokens, vocab)
    targets[3::7] = -100
    workspace = Workspace(256) if impl == "chunked" else None
    options = {"temperature": 0.7, "softcap": 4.0}
    output = linear_logprob(
        hidden,
        weight,
        targets,
        bias=bias,
        entropy="grad",
        impl=impl,
        workspace=workspace,
        **options,
    )
    expected = slow_logprob(hidden, weight, targets, bias=bias, **options)
    assert output.logprobs.dtype == torch.float32
    assert output.logprobs.shape == (num_tokens,)
    assert torch.allclose(output.logprobs.double(), expected[0], atol=1e-5, rtol=0)
    assert torch.allclose(output.entropy.double(), expected[1], atol=1e-5, rtol=0)
    leaves = (hidden, weight, bias)
    got = gradients((output.logprobs, output.entropy), upstream, leaves)
    want = gradients(expected, upstream, leaves)
    for name, value, reference in zip(["hidden", "weight", "bias"], got, want, strict=True):
        if vocab == 1:  # one token has probability 1: no gradient but rounding
            assert value.abs().sum() < 1e-4
        else:
            assert relative_error(value, reference) < 2e-6, name


@pytest.mark.parametrize("vocab", [32000, 50257, 128256, 151936, 152064, 262144])
def test_vocabularies_of_models(vocab):
    hidden, weight, _, targets, upstream = make_inputs(3, vocab, size=8)
    targets[0] = vocab - 1
    output = linear_logprob(hidden, weight, targets, entropy="grad")
    expected = slow_logprob(hidden, weight, targets)
    got = gradients((output.logprobs, output.entropy), upstream, (hidden, weight))
    want = gradients(expected, upstream, (hidden, weight))
    for value, reference in zip((output.logprobs, output.entropy), expected, strict=True):
        assert (value.double() - reference).abs().max() < 5e-5
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck_in_float64(impl, softcap):
    hidden, weight, bias, targets, _ = make_inputs(6, 23, size=5, dtype=torch.float64)
    targets[2] = -100
    workspace = Workspace(7) if impl == "chunked" else None

    def function(hidden, weight, bias):
        output = linear_logprob(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=1.3,
            softcap=softcap,
            entropy="grad",
            impl=impl,
            workspace=workspace,
        )
        return output.logprobs, output.entropy

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("chunk_columns", [1, 100, 300, 4096])
def test_only_the_entropy_gradient(chunk_columns):
    hidden, weight, bias, targets, upstream = make_inputs(40, 300)
    output = linear_logprob(
        hidden, weight, targets, bias=bias, entropy="grad", workspace=Workspace(chunk_columns)
    )
    got = torch.autograd.grad((output.entropy * upstream[1]).sum(), (hidden, weight, bias))
    _, entropy = slow_logprob(hidden, weight, targets, bias=bias)
    want = torch.autograd.grad((entropy * upstream[1]).sum(), (hidden, weight, bias))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 2e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_entropy_value_is_detached_and_none_is_none(impl):
    hidden, weight, _, targets, _ = make_inputs(9, 50)
    value = linear_logprob(hidden, weight, targets, entropy="value", impl=impl)
    grad = linear_logprob(hidden, weight, targets, entropy="grad", impl=impl)
    assert not value.entropy.requires_grad
    assert grad.entropy.requires_grad
    assert torch.equal(value.entropy, grad.entropy)
    assert linear_logprob(hidden, weight, targets, impl=impl).entropy is None
    value.logprobs.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_all_rows_ignored_give_zeros_and_zero_gradients(impl):
    hidden, weight, bias, targets, _ = make_inputs(12, 70)
    output = linear_logprob(
        hidden, weight, torch.full_like(targets, -100), bias=bias, entropy="grad", impl=impl
    )
    assert not output.logprobs.any()
    assert not output.entropy.any()
    for gradient in gradients(
        (output.logprobs, output.entropy), torch.ones(2, 12), (hidden, weight, bias)
    ):
        assert not gradient.any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ignored_rows_do_not_change_the_others(impl):
    hidden, weight, _, targets, upstream = make_inputs(20, 90)
    masked = targets.clone()
    masked[::2] = 5
    output = linear_logprob(hidden, weight, masked, ignore_index=5, entropy="grad", impl=impl)
    kept = masked != 5
    alone = linear_logprob(hidden[kept], weight, masked[kept], entropy="grad", impl=impl)
    assert torch.equal(output.logprobs[kept], alone.logprobs)
    assert torch.equal(output.entropy[kept], alone.entropy)
    assert not output.logprobs[~kept].any()
    (gradient,) = gradients((output.logprobs, output.entropy), upstream, [hidden])
    assert not gradient[~kept].any()
    assert gradient[kept].any(dim=1).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_bias_of_minus_infinity_takes_a_token_out_of_the_vocabulary(impl):
    hidden = torch.zeros(2, 8, requires_grad=True)
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0], requires_grad=True)
    output = linear_logprob(
        hidden, weight, torch.tensor([0, 3]), bias=bias, entropy="grad", impl=impl
    )
    assert output.entropy.tolist() == pytest.approx([math.log(3)] * 2)
    assert output.logprobs.tolist() == pytest.approx([-math.log(3)] * 2)
    upstream = (torch.ones(2), torch.ones(2))
    for gradient in gradients((output.logprobs, output.entropy), upstream, (hidden, weight, bias)):
        assert gradient.isfinite().all()
    assert gradient[2] == 0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shift", [1e4, -1e4, -150.0])
def test_shifted_logits_stay_finite_and_right(impl, shift):
    hidden, weight, _, targets, upstream = make_inputs(31, 700)
    bias = torch.full((700,), shift, requires_grad=True)
    workspace = Workspace(256) if impl == "chunked" else None
    output = linear_logprob(
        hidden, weight, targets, bias=bias, entropy="grad", impl=impl, workspace=workspace
    )
    expected = slow_logprob(hidden, weight, targets)
    # float32 logits near 1e4 are multiples of 2^-10; the result must not be worse than that.
    tolerance = max(1e-5, 3 * abs(shift) * 2**-23)
    assert torch.allclose(output.logprobs.double(), expected[0], atol=tolerance, rtol=0)
    assert torch.allclose(output.entropy.double(), expected[1], atol=tolerance, rtol=0)
    for gradient in gradients((output.logprobs, output.entropy), upstream, (hidden, weight, bias)):
        assert gradient.isfinite().all()


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


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bfloat16_inputs_are_computed_in_float32(impl):
    hidden, weight, bias, targets, upstream = make_inputs(64, 500, dtype=torch.bfloat16)
    output = linear_logprob(hidden, weight, targets, bias=bias, entropy="grad", impl=impl)
    leaves = (hidden, weight, bias)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = slow_logprob(doubles[0], doubles[1], targets, bias=doubles[2])
    assert output.logprobs.dtype == torch.float32
    assert (output.logprobs.double() - expected[0]).abs().max() < 5e-5
    assert (output.entropy.double() - expected[1]).abs().max() < 5e-4
    naive = torch.log_softmax((hidden @ weight.T + bias).float(), -1)
    naive = naive.gather(1, targets[:, None]).squeeze(1)
    assert (naive.double() - expected[0]).abs().max() > 1e-3  # bf16 logits would be noticed
    got = gradients((output.logprobs, output.entropy), upstream, leaves)
    want = gradients(expected, upstream, doubles)
    for value, reference in zip(got, want, strict=True):
        assert value.dtype == torch.bfloat16
        assert relative_error(value, reference) < 3e-3


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_autocast_changes_no_value(impl):
    hidden, weight, _, targets, _ = make_inputs(30, 200)
    plain = linear_logprob(hidden, weight, targets, entropy="grad", impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear_logprob(hidden, weight, targets, entropy="grad", impl=impl)
    assert torch.equal(output.logprobs, plain.logprobs)
    assert torch.equal(output.entropy, plain.entropy)


def test_backward_recomputes_outside_autocast():
    hidden, weight, _, targets, upstream = make_inputs(30, 200)
    output = linear_logprob(hidden, weight, targets)
    want = torch.autograd.grad((output.logprobs * upstream[0]).sum(), (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear_logprob(hidden, weight, targets)
        got = torch.autograd.grad((output.logprobs * upstream[0]).sum(), (hidden, weight))
    assert all(torch.equal(value, reference) for value, reference in zip(got, want, strict=True))


def test_frozen_weight_and_frozen_hidden_get_no_gradient():
    hidden, weight, bias, targets, upstream = make_inputs(17, 130)
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


def test_rows_without_upstream_gradient_cost_and_change_nothing():
    hidden, weight, _, targets, upstream = make_inputs(50, 120)
    sparse = upstream[0].clone()
    sparse[10:] = 0
    output = linear_logprob(hidden, weight, targets)
    got = torch.autograd.grad((output.logprobs * sparse).sum(), (hidden, weight))
    few = linear_logprob(hidden[:10], weight, targets[:10])
    want = torch.autograd.grad((few.logprobs * sparse[:10]).sum(), (hidden, weight))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 1e-6


def test_runs_are_bitwise_repeatable():
    hidden, weight, bias, targets, upstream = make_inputs(60, 1000)
    runs = []
    for _ in range(5):
        output = linear_logprob(
            hidden, weight, targets, bias=bias, entropy="grad", workspace=Workspace(300)
        )
        pair = (output.logprobs, output.entropy)
        runs.append((*pair, *gradients(pair, upstream, (hidden, weight, bias))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_logprobs_are_never_positive():
    hidden, weight, _, targets, _ = make_inputs(200, 40, spread=40.0)
    best = (hidden @ weight.T).argmax(1)
    for chosen in (best, targets):
        assert (linear_logprob(hidden, weight, chosen, workspace=Workspace(16)).logprobs <= 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
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
    hidden, weight, _, targets, _ = make_inputs(4, 20)
    with pytest.raises(ValueError, match=message):
        linear_logprob(hidden, weight, targets, **options)


def test_bad_tensors_are_refused():
    hidden, weight, _, targets, _ = make_inputs(4, 20)
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


def masked_inputs(num_tokens=9, vocab=40, num_ids=31):
    """Inputs with padding from `num_ids` on and two forbidden ids, and what they amount to."""
    hidden, weight, bias, targets, upstream = make_inputs(num_tokens, vocab)
    bias = bias.detach().index_fill(0, torch.tensor([3, 17]), -math.inf).requires_grad_()
    allowed = torch.tensor([i for i in range(num_ids) if i not in (3, 17)])
    targets = allowed[targets % len(allowed)]
    doubles = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    return (hidden, weight, bias), targets, upstream, doubles, allowed


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "loss"])
def test_padding_and_forbidden_tokens_have_no_probability_and_no_gradient(impl, softcap):
    (hidden, weight, bias), targets, upstream, doubles, allowed = masked_inputs()
    options = {"bias": bias, "temperature": 0.7, "softcap": softcap, "num_tokens": 31}
    if impl == "loss":

        def token_loss(logprobs, entropies, rows):
            both = (logprobs * upstream[0][rows]).sum() + (entropies * upstream[1][rows]).sum()
            return both, upstream[0][rows], upstream[1][rows]

        output = linear_policy_loss(hidden, weight, targets, token_loss, **options)
        loss = output.loss
    else:
        output = linear_logprob(hidden, weight, targets, entropy="grad", impl=impl, **options)
        loss = sum(
            (o * g).sum() for o, g in zip((output.logprobs, output.entropy), upstream, strict=True)
        )
    wanted = slow_logprob(
        doubles[0],
        doubles[1][allowed],
        torch.searchsorted(allowed, targets),
        bias=doubles[2][allowed],
        temperature=0.7,
        softcap=softcap,
    )
    for value, reference in zip((output.logprobs, output.entropy), wanted, strict=True):
        assert (value - reference).abs().max() < 1e-5
    expected = gradients(wanted, upstream, doubles)
    for value, reference in zip(
        torch.autograd.grad(loss, (hidden, weight, bias)), expected, strict=True
    ):
        assert relative_error(value, reference) < 1e-5
