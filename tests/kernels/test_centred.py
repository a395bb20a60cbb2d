"""precision='centred': bfloat16 products that stay accurate where it matters."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from lightrft.kernels import linear_logprob
from lightrft.kernels.logprob.selection import pick_fastest
from lightrft.kernels.logprob.self_tests import centred_products_are_right


def make_inputs(num_tokens=200, vocab=1500, size=128, spread=9.0):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, size, generator=generator).bfloat16()
    weight = (torch.randn(vocab, size, generator=generator) * (spread / math.sqrt(size))).bfloat16()
    # Sampled from the model, as rollouts are.
    logits = hidden.float() @ weight.float().T
    targets = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)
    upstream = torch.randn(2, num_tokens, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def relative_error(value, expected):
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.skipif(
    not centred_products_are_right(torch.device("cpu")),
    reason="this library rounds a product before it adds the bias",
)
def test_error_bounds_of_sampled_targets():
    hidden, weight, targets, upstream = make_inputs()
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = linear_logprob(*doubles, targets, entropy="grad", impl="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = linear_logprob(hidden, weight, targets, entropy="grad", precision="centred")
    error = (output.logprobs.double() - exact.logprobs).abs()
    assert error.max() < 3e-2
    assert error.mean() < 2e-3
    plain = torch.log_softmax((hidden @ weight.T).float(), 1)
    plain = plain.gather(1, targets[:, None]).squeeze(1)
    plain_error = (plain.double() - exact.logprobs).abs()
    assert plain_error.mean() > 5 * error.mean()
    want = torch.autograd.grad((exact.logprobs * upstream[0]).sum(), doubles, retain_graph=True)
    got = torch.autograd.grad(
        (output.logprobs * upstream[0]).sum(), (hidden, weight), retain_graph=True
    )
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 4e-3
    want = torch.autograd.grad((exact.entropy * upstream[1]).sum(), doubles)
    got = torch.autograd.grad((output.entropy * upstream[1]).sum(), (hidden, weight))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 1e-2


def test_what_centring_cannot_do_is_refused():
    hidden, weight, targets, _ = make_inputs(4, 20, 8)
    for options, message in (
        ({"softcap": 30.0}, "softcap needs the logits themselves"),
        ({"impl": "triton"}, "impl='triton' is always exact"),
        ({"deterministic": "batch_invariant"}, "depend on the number of tokens"),
        ({"impl": "cublas"}, "impl='cublas' needs CUDA tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_logprob(hidden, weight, targets, precision="centred", **options)


def test_a_measured_choice_is_made_once_for_each_shape():
    seconds = {"slow": 2.0, "fast": 1.0}
    measured = []

    def measure(engine):
        measured.append(engine)
        return seconds[engine]

    assert pick_fastest("shape of a test", ["slow", "fast"], measure) == "fast"
    seconds["slow"] = 0.1
    assert pick_fastest("shape of a test", ["slow", "fast"], measure) == "fast"
    assert measured == ["slow", "fast"]
    assert pick_fastest("another shape of a test", ["slow", "fast"], measure) == "slow"
