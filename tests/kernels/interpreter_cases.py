# ruff: noqa: E402 - nothing may import Triton before the environment is checked
"""Triton kernels in Triton's interpreter, on the CPU, against float64.

Run by test_triton.py in a process of its own: TRITON_INTERPRET must be set before Triton is
imported. bfloat16 stores of the interpreter truncate, so gradients are held to the bound of
bfloat16 only where the rounding is torch's.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton.py"

from lightrft.kernels import Workspace, linear_logprob
from lightrft.kernels.logprob import triton_launch
from lightrft.kernels.logprob.chunked_engine import ChunkedEngine
from lightrft.kernels.logprob.operators import logprob_forward
from lightrft.kernels.logprob.policy_loss import LinearPolicyLoss, PolicyLossOptions
from lightrft.kernels.logprob.product_engine import ProductEngine
from lightrft.kernels.logprob.selection import name_engine
from lightrft.kernels.logprob.triton_launch import Partials, TileConfig, TritonEngine, fold_grid
from lightrft.kernels.logprob.types import LogitsTransform, LogprobOutput

# A few big tiles: the interpreter pays for each.
TILES = TileConfig(128, 256, 64, 4, 2, tiles_per_split=2)
BULK = TileConfig(128, 256, 64, 4, 2, tiles_per_split=1, uses_tma=True)
HARD = LogitsTransform(temperature=0.7, softcap=20.0)
ENGINES = {
    "fused": TritonEngine(1024, TILES, TILES),
    "bulk": TritonEngine(1024, BULK, TILES),
    "products": ProductEngine(1024),
}


def engine_logprob(hidden, weight, bias, targets, engine, transform, entropy):
    """`linear_logprob` by this very engine."""
    logprobs, entropies, _, _ = logprob_forward(
        hidden,
        weight,
        bias,
        targets,
        transform.temperature,
        transform.softcap,
        -100,
        entropy,
        name_engine(engine),
        1024,
        None,
    )
    return LogprobOutput(logprobs, None if entropy == "none" else entropies)


def float64_logprob(hidden, weight, bias, targets, transform):
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = torch.log_softmax(logits / transform.temperature, 1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def make_inputs(num_tokens, vocab, *, size=72, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (spread / math.sqrt(size))
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    upstream = torch.randn(2, num_tokens, generator=generator)
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    return (*leaves, targets, upstream)


def relative_error(value, expected):
    difference = (value.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm())


def check(engine, num_tokens, vocab, *, transform=HARD, dtype=torch.float32, bias=True):
    hidden, weight, bias_tensor, targets, upstream = make_inputs(num_tokens, vocab, dtype=dtype)
    leaves = [hidden, weight, bias_tensor] if bias else [hidden, weight]
    output = engine_logprob(
        hidden, weight, bias_tensor if bias else None, targets, engine, transform, "grad"
    )
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = float64_logprob(
        doubles[0], doubles[1], doubles[2] if bias else None, targets, transform
    )
    # A float32 logit of size z is off by about z * 2^-24, and so is what is computed from it.
    largest = float((doubles[0].detach() @ doubles[1].detach().T).abs().max())
    largest = largest if transform.softcap is None else min(largest, transform.softcap)
    scale = max(1.0, largest / transform.temperature / 50)
    for value, reference in zip((output.logprobs, output.entropy), expected, strict=True):
        assert (value.double() - reference).abs().max() < 5e-5 * scale
        assert (value.double() - reference).abs().mean() < 1e-5 * scale
    if vocab == 1:
        return
    outputs = (output.logprobs, output.entropy)
    got = torch.autograd.grad(
        sum((o * g).sum() for o, g in zip(outputs, upstream, strict=True)), leaves
    )
    want = torch.autograd.grad(
        sum((o * g).sum() for o, g in zip(expected, upstream, strict=True)), doubles
    )
    bound = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < bound * scale


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
def test_a_temperature_of_one_hundredth(name, softcap):
    check(ENGINES[name], 20, 300, transform=LogitsTransform(0.01, softcap), bias=False)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("num_tokens", "vocab"), [(1, 255), (127, 256), (129, 257), (3, 1), (128, 1408)]
)
def test_values_and_gradients_equal_float64(name, num_tokens, vocab):
    check(ENGINES[name], num_tokens, vocab)


@pytest.mark.parametrize("name", ["fused", "products"])
def test_without_bias_softcap_and_temperature(name):
    check(ENGINES[name], 65, 700, transform=LogitsTransform(1.0, None), bias=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ENGINES)
def test_16_bit_inputs(name, dtype):
    if name == "bulk" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 operands")
    check(ENGINES[name], 128, 600, dtype=dtype)


@pytest.mark.parametrize("name", ["fused", "products"])
@pytest.mark.parametrize("size", [1e-7, 1e5])
def test_float16_gradients_of_any_size(name, size):
    hidden, weight, _, targets, upstream = make_inputs(32, 300, size=16, dtype=torch.float16)
    output = engine_logprob(
        hidden, weight, None, targets, ENGINES[name], LogitsTransform(1.0, None), "grad"
    )
    loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
    got = torch.autograd.grad(loss * size, (hidden, weight))
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    expected = float64_logprob(*doubles, None, targets, LogitsTransform(1.0, None))
    loss = (expected[0] * upstream[0]).sum() + (expected[1] * upstream[1]).sum()
    want = torch.autograd.grad(loss * size, doubles)
    for value, reference in zip(got, want, strict=True):
        rounded = reference.half().double()
        if rounded.isfinite().all():
            # Stored in 16 bits once before: 1e-3 of the norm.
            rounding = float((rounded - reference).norm() / reference.norm())
            assert relative_error(value, reference) < 1.2 * rounding + 1e-3


@pytest.mark.parametrize("name", ["fused", "products"])
@pytest.mark.parametrize("size", [9, 100])
def test_hidden_sizes_that_fill_no_tile(name, size):
    hidden, weight, _, targets, _ = make_inputs(20, 50, size=size)
    output = engine_logprob(hidden, weight, None, targets, ENGINES[name], HARD, "value")
    expected, entropy = float64_logprob(hidden, weight, None, targets, HARD)
    assert (output.logprobs - expected).abs().max() < 5e-5
    assert (output.entropy - entropy).abs().max() < 5e-5


def test_partials_merge_as_one_pass():
    # More splits than one block of the merge, some of which saw nothing.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 75, 8, generator=generator).double() * 20
    logits[:, 3] = -torch.inf
    logits[5] = -torch.inf
    maximum = logits.amax(2)
    finite = torch.where(maximum > -torch.inf, maximum, 0)
    weights = (logits - finite[:, :, None]).exp()
    shifted = torch.where(weights > 0, logits - finite[:, :, None], 0)
    planes = torch.stack((maximum, weights.sum(2), (weights * shifted).sum(2)))
    partials = Partials(planes.transpose(1, 2).contiguous().float(), needs_entropy=True)
    rows = partials.merge(torch.zeros(40))
    kept = torch.arange(40) != 5
    whole = logits.flatten(1)
    assert torch.equal(rows.maximum, maximum.amax(1).float())
    assert rows.exp_sum[5] == 0
    log_sum = torch.logsumexp(whole, 1) - maximum.amax(1)
    assert (rows.log_sum.double() - log_sum)[kept].abs().max() < 5e-6
    p = torch.softmax(whole[kept], 1)
    entropy = -(p * torch.where(p > 0, p.log(), 0)).sum(1)
    assert (rows.entropy[kept].double() - entropy).abs().max() < 5e-5


def test_bulk_copies_prove_themselves_and_wrong_ones_are_not_used(monkeypatch):
    arguments = (torch.device("cpu"), torch.float16, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_launch, "bulk_tiles", lambda *_, **__: (BULK,))
    assert triton_launch.working_bulk_tiles(*arguments) == BULK
    triton_launch.working_bulk_tiles.cache_clear()
    exact = triton_launch.finish_target_logits
    monkeypatch.setattr(triton_launch, "finish_target_logits", lambda *given: exact(*given) + 1e-3)
    with pytest.warns(RuntimeWarning, match="logprobs are off by"):
        assert triton_launch.working_bulk_tiles(*arguments) is None
    triton_launch.working_bulk_tiles.cache_clear()


def test_products_are_folded_by_enough_programs():
    # A block of 512 tokens and 16384 columns, the 32 MiB that are stored at a time.
    rows, columns = fold_grid(512, 16384)
    assert rows * columns >= 3 * 132


@pytest.mark.parametrize("name", ENGINES)
def test_no_phantom_columns(name):
    # Columns beyond the vocabulary read as 0 would hold nearly all the probability.
    hidden, weight, _, targets, _ = make_inputs(16, 300)
    bias = torch.full((300,), -30.0)
    output = engine_logprob(
        hidden, weight, bias, targets, ENGINES[name], LogitsTransform(1.0, None), "value"
    )
    expected, entropy = float64_logprob(hidden, weight, bias, targets, LogitsTransform(1.0, None))
    assert (output.logprobs - expected).abs().max() < 5e-5
    assert (output.entropy - entropy).abs().max() < 5e-5


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("shift", [-150.0, 1e4, -1e4])
def test_running_maximum_starts_below_every_logit(name, shift):
    hidden, weight, _, targets, upstream = make_inputs(16, 600)
    bias = torch.full((600,), shift)
    output = engine_logprob(
        hidden, weight, bias, targets, ENGINES[name], LogitsTransform(1.0, None), "grad"
    )
    expected, entropy = float64_logprob(hidden, weight, None, targets, LogitsTransform(1.0, None))
    tolerance = max(5e-5, 4 * abs(shift) * 2**-23)
    assert (output.logprobs - expected).abs().max() < tolerance
    assert (output.entropy - entropy).abs().max() < tolerance
    loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert gradient.isfinite().all()


# The sum of weights, 1 + 1e-6, is itself a multiple of 2^-23; and the interpreter adds columns one
# by one, where each of those terms is lost.
@pytest.mark.parametrize(
    ("name", "certainty", "relative"),
    [("fused", 1e-3, 0.01), ("fused", 1e-6, 0.1), ("products", 1e-3, 0.01)],
)
def test_near_certain_target_keeps_its_gradient(name, certainty, relative):
    weight = torch.zeros(20, 16, requires_grad=True)
    hidden = torch.zeros(4, 16)
    bias = torch.zeros(20)
    bias[7] = math.log(19 / certainty)
    bias.requires_grad_()
    output = engine_logprob(
        hidden, weight, bias, torch.full((4,), 7), ENGINES[name], LogitsTransform(1.0, None), "none"
    )
    (gradient,) = torch.autograd.grad(output.logprobs.sum(), bias)
    assert gradient[7].item() == pytest.approx(4 * certainty, rel=relative)


def test_rows_of_a_batch_do_not_depend_on_each_other():
    # The interpreter multiplies with NumPy, whose sums over `size` may depend on a row's place in
    # its block. Products of small integers are exact in any order; the sums over the vocabulary
    # are the kernel's own.
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randint(-4, 5, shape, generator=generator).float()
        for shape in ((150, 72), (500, 72), (500,))
    )
    targets = torch.randint(0, 500, (150,), generator=generator)

    def run(rows):
        return linear_logprob(
            hidden[rows],
            weight,
            targets[rows],
            bias=bias,
            temperature=60.0,
            entropy="value",
            impl="triton",
        )

    whole = run(slice(None))
    for part in (slice(0, 1), slice(3, 80), slice(149, 150)):
        alone = run(part)
        assert torch.equal(alone.logprobs, whole.logprobs[part])
        assert torch.equal(alone.entropy, whole.entropy[part])
    # Tiles that followed the size of the batch would be noticed: sums in another order differ.
    other = engine_logprob(
        hidden, weight, bias, targets, ENGINES["bulk"], LogitsTransform(60.0, None), "value"
    )
    assert not torch.equal(other.entropy, whole.entropy)
    assert (other.entropy - whole.entropy).abs().max() < 5e-5


def test_public_function_with_ignored_rows_and_sparse_gradients():
    hidden, weight, _, targets, upstream = make_inputs(40, 300)
    targets[::3] = -100
    upstream[:, :10] = 0
    results = []
    for impl in ("triton", "chunked"):
        output = linear_logprob(
            hidden, weight, targets, entropy="grad", impl=impl, workspace=Workspace(128)
        )
        loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        results.append((output.logprobs, output.entropy, *gradients))
    for value, reference in zip(*results, strict=True):
        assert relative_error(value, reference) < 1e-5
    assert not results[0][2][::3].any()
    assert not results[0][2][:10].any()


@pytest.mark.parametrize("budget", [0, 2**31])
def test_loss_inside_the_output_layer(budget):
    hidden, weight, bias, targets, data = make_inputs(70, 600)

    def token_loss(logprobs, entropy, rows):
        loss = (logprobs * data[0][rows] + entropy * data[1][rows]).sum()
        return loss, data[0][rows], data[1][rows]

    rows = torch.arange(70)
    options = PolicyLossOptions(
        ENGINES["products"], token_loss, (rows[:40], rows[40:]), budget, "grad"
    )
    loss, logprobs, entropy = LinearPolicyLoss.apply(hidden, weight, bias, targets, HARD, options)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    expected = float64_logprob(*doubles, targets, HARD)
    assert (logprobs - expected[0]).abs().max() < 5e-5
    assert (entropy - expected[1]).abs().max() < 5e-5
    want = torch.autograd.grad((expected[0] * data[0] + expected[1] * data[1]).sum(), doubles)
    got = torch.autograd.grad(loss, (hidden, weight, bias))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 5e-6


class Recording(ProductEngine):
    """Keeps the numbers of rows of all products."""

    def products(self, hidden, chunk):
        SEEN.append(len(hidden))
        return super().products(hidden, chunk)


SEEN: list[int] = []


@pytest.mark.parametrize("counts", [(70,), (40, 30), (1,), (16, 17)])
def test_b1_rows_of_zeros_fill_a_loss_up_to_whole_vectors(counts):
    hidden, weight, bias, targets, data = make_inputs(70, 600)
    parts = torch.arange(sum(counts)).split(counts)

    def token_loss(logprobs, entropy, rows):
        assert len(logprobs) == len(entropy) == len(rows)
        loss = (logprobs * data[0][rows] + entropy * data[1][rows]).sum()
        return loss, data[0][rows], data[1][rows]

    SEEN.clear()
    options = PolicyLossOptions(Recording(512), token_loss, parts, 2**31, "grad")
    loss, *_ = LinearPolicyLoss.apply(hidden, weight, bias, targets, HARD, options)
    assert SEEN
    assert all(number % 16 == 0 for number in SEEN)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    expected = float64_logprob(*doubles, targets, HARD)
    own = slice(0, sum(counts))
    wanted = (expected[0] * data[0] + expected[1] * data[1])[own].sum()
    want = torch.autograd.grad(wanted, doubles)
    got = torch.autograd.grad(loss, (hidden, weight, bias))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 5e-6


@pytest.mark.parametrize("counts", [(70,), (40, 30)])
def test_b2_one_chunk_writes_the_gradient_of_a_bfloat16_weight_rounded_once(counts):
    hidden, weight, bias, targets, data = make_inputs(70, 600, dtype=torch.bfloat16)

    def token_loss(logprobs, entropy, rows):
        del entropy
        return (logprobs * data[0][rows]).sum(), data[0][rows], None

    parts = torch.arange(70).split(counts)
    options = PolicyLossOptions(ENGINES["products"], token_loss, parts, 2**31, "none")
    loss, *_ = LinearPolicyLoss.apply(hidden, weight, bias, targets, HARD, options)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    logprobs, _ = float64_logprob(*doubles, targets, HARD)
    want = torch.autograd.grad((logprobs * data[0]).sum(), doubles)
    got = torch.autograd.grad(loss, (hidden, weight, bias))
    for value, reference in zip(got, want, strict=True):
        assert value.dtype == torch.bfloat16
        # A rounding to bfloat16 is 2^-9 of each number.
        assert relative_error(value, reference) < 3e-3


def test_stored_products_give_the_same_as_chunks_of_logits():
    hidden, weight, bias, targets, upstream = make_inputs(130, 1500, dtype=torch.float16)
    results = []
    for engine in (ENGINES["products"], ChunkedEngine(1024)):
        output = engine_logprob(hidden, weight, bias, targets, engine, HARD, "grad")
        loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight, bias))
        results.append((output.logprobs, output.entropy, *gradients))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-5
    assert (results[0][1] - results[1][1]).abs().max() < 2e-5
    for value, reference in zip(results[0][2:], results[1][2:], strict=True):
        assert relative_error(value, reference) < 1e-3


def test_a_split_weight_gives_float32_logprobs_and_gradients():
    hidden, weight, _, targets, upstream = make_inputs(60, 700)
    hidden = hidden.detach().bfloat16().requires_grad_()
    engine = ProductEngine(512, splits_weight=True)
    plain = LogitsTransform(1.0, None)
    output = engine_logprob(hidden, weight, None, targets, engine, plain, "none")
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = float64_logprob(*doubles, None, targets, plain)[0]
    assert (output.logprobs - exact).abs().max() < 5e-5
    found = torch.autograd.grad(output.logprobs, (hidden, weight), upstream[0])
    wanted = torch.autograd.grad(exact, doubles, upstream[0].double())
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.float32]
    # Gradients of logits in bfloat16; that of hidden is rounded once more.
    assert relative_error(found[1], wanted[1]) < 4e-3
    assert relative_error(found[0], wanted[0]) < 8e-3


def test_no_row_at_all():
    hidden, weight, bias, targets, _ = make_inputs(5, 30)
    output = linear_logprob(
        hidden, weight, torch.full_like(targets, -100), bias=bias, entropy="grad", impl="triton"
    )
    loss = output.logprobs.sum() + output.entropy.sum()
    assert all(not g.any() for g in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_repeated_runs_are_bitwise_equal():
    hidden, weight, bias, targets, upstream = make_inputs(60, 600)
    runs = []
    for _ in range(3):
        output = linear_logprob(hidden, weight, targets, bias=bias, entropy="grad", impl="triton")
        loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight, bias))
        runs.append((output.logprobs, output.entropy, *gradients))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_float64_is_refused():
    hidden, weight, _, targets, _ = make_inputs(4, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match="impl='triton' is not available here: it needs hidden"):
        linear_logprob(hidden, weight, targets, impl="triton")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_forbidden_token_has_no_probability_and_no_gradient(name, softcap):
    transform = LogitsTransform(0.7, softcap)
    hidden, weight, bias, targets, upstream = make_inputs(20, 300)
    forbidden, targets = torch.tensor([5, 299]), targets.clamp(6, 298)
    bias = bias.detach().index_fill(0, forbidden, -math.inf).requires_grad_()
    output = engine_logprob(hidden, weight, bias, targets, ENGINES[name], transform, "grad")
    allowed = torch.tensor([i for i in range(300) if i not in (5, 299)])
    doubles = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    wanted = float64_logprob(
        doubles[0],
        doubles[1][allowed],
        doubles[2][allowed],
        torch.searchsorted(allowed, targets),
        transform,
    )
    outputs = (output.logprobs, output.entropy)
    for value, reference in zip(outputs, wanted, strict=True):
        assert (value.double() - reference).abs().max() < 5e-5
    sums = [
        sum((o * g).sum() for o, g in zip(each, upstream, strict=True))
        for each in (outputs, wanted)
    ]
    got = torch.autograd.grad(sums[0], (hidden, weight, bias))
    for value, reference in zip(got, torch.autograd.grad(sums[1], doubles), strict=True):
        assert relative_error(value, reference) < 5e-6
