"""linear_logprob on a GPU: every implementation and the whole shape list against float64."""

import pytest
import torch
from tests.kernels import logprob_world
from tests.kernels.logprob_world import check_logprob, check_loss, compare, relative_error, weighted

from lightrft.kernels import Workspace, linear_logprob

pytestmark = pytest.mark.gpu
IMPLEMENTATIONS = ["chunked", "triton", "cublas"]
# Of log-probabilities and of entropies.
VALUES = (5e-5, 5e-4)
BIG_VOCABULARIES = [32000, 50257, 128256, 151936, 152064, 262144]


@pytest.fixture(autouse=True)
def _full_sums():
    # What products of 16 bits need to be rounded once.
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction = before


def make_inputs(num_tokens, vocab, size, *, has_bias=False):
    """Return inputs whose targets are sampled from what they say."""
    leaves, targets, upstream = logprob_world.make_inputs(
        num_tokens, vocab, size=size, dtype=torch.bfloat16, has_bias=has_bias, device="cuda"
    )
    if num_tokens > 0:
        logits = (leaves[0].float() @ leaves[1].float().T).detach()
        targets = torch.multinomial(torch.softmax(logits, 1), 1).squeeze(1)
    return leaves, targets, upstream


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
    leaves, targets, upstream = make_inputs(num_tokens, vocab, size)
    for index, bound in enumerate((3e-3, 8e-3)):
        output = linear_logprob(*leaves, targets, impl=impl, entropy="grad")
        assert output.logprobs.shape == (num_tokens,)
        # One token has probability 1: no gradient but rounding.
        bound = 1.0 if vocab == 1 else bound
        alone = upstream.clone()
        alone[1 - index] = 0
        outputs = (output.logprobs, output.entropy)
        compare(outputs, leaves, targets, alone, value=VALUES, gradient=bound)


by_tiles_and_products = pytest.mark.parametrize("impl", ["triton", "cublas"])


@by_tiles_and_products
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


@by_tiles_and_products
def test_twenty_runs_are_bitwise_equal(impl):
    leaves, targets, upstream = make_inputs(300, 20000, 512)
    first = None
    for _ in range(20):
        output = linear_logprob(*leaves, targets, impl=impl, entropy="grad")
        loss = weighted((output.logprobs, output.entropy), upstream)
        run = (output.logprobs, output.entropy, *torch.autograd.grad(loss, leaves))
        if first is None:
            first = run
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


@pytest.mark.parametrize("budget", [0, 2**31])
def test_loss_inside_the_output_layer(budget):
    how = {"chunk_tokens": 128, "logits_budget_bytes": budget}
    check_loss(*make_inputs(300, 20000, 512), value=VALUES, gradient=8e-3, how=how)


@by_tiles_and_products
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"temperature": 0.7}])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [512, 9])
def test_tiles_of_every_feature(impl, options, has_bias, size):
    leaves, targets, upstream = make_inputs(300, 5000, size, has_bias=has_bias)
    bounds = {"value": (1e-4, 5e-4), "gradient": 8e-3}
    check_logprob(leaves, targets, upstream, impl=impl, **bounds, **options)


def test_a_graph_records_both_passes():
    (hidden, weight), targets, upstream = make_inputs(256, 5000, 512)
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
    (hidden, weight), targets, upstream = make_inputs(256, 5000, 512)
    linear_logprob(hidden, weight, targets, impl="triton")
    with torch.profiler.profile() as profile:
        output = linear_logprob(hidden, weight, targets, impl="triton")
        torch.autograd.grad(output.logprobs, (hidden, weight), upstream[0])
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaStreamSynchronize", 0) <= 2, counts
