"""linear_logprob on a GPU: every implementation and the whole shape list against float64."""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import Workspace, linear_logprob, linear_policy_loss

pytestmark = pytest.mark.gpu
IMPLEMENTATIONS = ["chunked", "triton", "cublas"]
BIG_VOCABULARIES = [32000, 50257, 128256, 151936, 152064, 262144]


@pytest.fixture(autouse=True)
def _full_sums():
    # What products of 16 bits need to be rounded once.
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction = before


def make_inputs(num_tokens, vocab, size, *, dtype=torch.bfloat16, spread=3.0):
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(num_tokens, size, **options).to(dtype)
    weight = (torch.randn(vocab, size, **options) * (spread / math.sqrt(size))).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,), **options)
    if num_tokens > 0:
        logits = hidden.float() @ weight.float().T
        sampled = torch.multinomial(torch.softmax(logits[:, : 2**24], 1), 1, generator=generator)
        targets = sampled.squeeze(1)
    upstream = torch.randn(2, num_tokens, **options)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def relative_error(value, expected):
    return float((value.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1408])
@pytest.mark.parametrize("size", [64, 100])
def test_small_shapes(impl, num_tokens, vocab, size):
    check(impl, num_tokens, vocab, size)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", BIG_VOCABULARIES)
def test_vocabularies_of_models(impl, vocab):
    check(impl, 128, vocab, 512)


def check(impl, num_tokens, vocab, size):
    hidden, weight, targets, upstream = make_inputs(num_tokens, vocab, size)
    output = linear_logprob(hidden, weight, targets, impl=impl, entropy="grad")
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = linear_logprob(*doubles, targets, entropy="grad", impl="reference")
    if num_tokens == 0:
        assert output.logprobs.shape == (0,)
        return
    error = (output.logprobs.double() - exact.logprobs).abs()
    assert error.max() <= 5e-5
    assert error.mean() <= 1e-5
    if vocab == 1:
        return
    pairs = ((output.logprobs, exact.logprobs, 3e-3), (output.entropy, exact.entropy, 8e-3))
    for index, (value, reference, bound) in enumerate(pairs):
        got = torch.autograd.grad(
            (value * upstream[index]).sum(), (hidden, weight), retain_graph=True
        )
        want = torch.autograd.grad((reference * upstream[index]).sum(), doubles, retain_graph=True)
        for gradient, expected in zip(got, want, strict=True):
            assert relative_error(gradient, expected) < bound


@pytest.mark.parametrize("impl", ["triton", "cublas"])
def test_more_logits_than_32_bits_count(impl):
    # N * V = 16384 * 131072 = 2^31.
    hidden, weight = torch.randn(16384, 64, device="cuda"), torch.randn(131072, 64, device="cuda")
    hidden, weight = hidden.bfloat16(), (weight * 0.3).bfloat16()
    targets = torch.randint(0, 131072, (16384,), device="cuda")
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    workspace = Workspace(131072) if impl == "triton" else None
    output = linear_logprob(*leaves, targets, impl=impl, workspace=workspace)
    torch.autograd.grad(output.logprobs.sum(), leaves)
    last = torch.arange(16384 - 32, 16384, device="cuda")
    logits = hidden[last].double() @ weight.double().T
    exact = torch.log_softmax(logits, 1).gather(1, targets[last][:, None]).squeeze(1)
    assert (output.logprobs[last].double() - exact).abs().max() < 5e-5


@pytest.mark.parametrize("impl", ["triton", "cublas"])
def test_twenty_runs_are_bitwise_equal(impl):
    hidden, weight, targets, upstream = make_inputs(300, 20000, 512)
    first = None
    for _ in range(20):
        output = linear_logprob(hidden, weight, targets, impl=impl, entropy="grad")
        loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
        run = (output.logprobs, output.entropy, *torch.autograd.grad(loss, (hidden, weight)))
        if first is None:
            first = run
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


@pytest.mark.parametrize("budget", [0, 2**31])
def test_loss_inside_the_output_layer(budget):
    hidden, weight, targets, data = make_inputs(300, 20000, 512)

    def token_loss(logprobs, entropy, rows):
        loss = (logprobs * data[0][rows] + 0.1 * entropy * data[1][rows]).sum()
        return loss, data[0][rows], 0.1 * data[1][rows]

    output = linear_policy_loss(
        hidden,
        weight,
        targets,
        token_loss,
        chunk_tokens=128,
        logits_budget_bytes=budget,
    )
    exact = linear_logprob(hidden, weight, targets, impl="chunked", entropy="grad")
    loss = (exact.logprobs * data[0] + 0.1 * exact.entropy * data[1]).sum()
    got = torch.autograd.grad(output.loss, (hidden, weight))
    want = torch.autograd.grad(loss, (hidden, weight))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference.double()) < 6e-3


def test_rows_of_a_batch_do_not_depend_on_each_other():
    hidden, weight, targets, _ = make_inputs(500, 20000, 512)
    whole = linear_logprob(hidden, weight, targets, impl="triton").logprobs
    for part in (slice(0, 1), slice(3, 180), slice(499, 500)):
        alone = linear_logprob(hidden[part], weight, targets[part], impl="triton").logprobs
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("impl", ["triton", "cublas"])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"temperature": 0.7}])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [512, 9])
def test_tiles_of_every_feature(impl, options, has_bias, size):
    hidden, weight, targets, upstream = make_inputs(300, 5000, size)
    bias = torch.randn(5000, device="cuda").bfloat16() if has_bias else None
    results = []
    for chosen in (impl, "reference"):
        output = linear_logprob(
            hidden, weight, targets, bias=bias, entropy="grad", impl=chosen, **options
        )
        loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        results.append((output.logprobs, output.entropy, *gradients))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-4
    assert (results[0][1] - results[1][1]).abs().max() < 5e-4
    for value, reference in zip(results[0][2:], results[1][2:], strict=True):
        assert relative_error(value, reference.double()) < 8e-3


def test_a_graph_records_both_passes():
    hidden, weight, targets, upstream = make_inputs(256, 5000, 512)
    targets[::5] = -100

    def run():
        output = linear_logprob(hidden, weight, targets, impl="triton")
        return output.logprobs, *torch.autograd.grad(output.logprobs, (hidden, weight), upstream[0])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [tensor.clone() for tensor in run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    graph.replay()
    torch.cuda.synchronize()
    for value, reference in zip(recorded, expected, strict=True):
        assert relative_error(value, reference.double()) < 1e-5


def test_a_pass_waits_once():
    hidden, weight, targets, upstream = make_inputs(256, 5000, 512)
    linear_logprob(hidden, weight, targets, impl="triton")
    with torch.profiler.profile() as profile:
        output = linear_logprob(hidden, weight, targets, impl="triton")
        torch.autograd.grad(output.logprobs, (hidden, weight), upstream[0])
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaStreamSynchronize", 0) <= 2, counts
