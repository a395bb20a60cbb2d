# ruff: noqa: E402 - nothing may import Triton before the environment is checked
"""Triton kernels in Triton's interpreter, on the CPU, against float64.

Run by test_triton.py in a process of its own: TRITON_INTERPRET must be set before Triton is
imported. bfloat16 stores of the interpreter truncate, so gradients are held to the bound of
bfloat16 only where the rounding is torch's.
"""

import math
import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton.py"

from tests.kernels.logprob_world import (
    compare,
    float64_program,
    make_inputs,
    relative_error,
    weighted,
    weighted_tokens,
)

from lightrft.kernels import linear_logprob
from lightrft.kernels.logprob.operators import logprob_forward
from lightrft.kernels.logprob.policy_loss import LinearPolicyLoss, PolicyLossOptions
from lightrft.kernels.logprob.product_engine import ProductEngine
from lightrft.kernels.logprob.selection import name_engine
from lightrft.kernels.logprob.triton_launch import Partials, TileConfig, TritonEngine, fold_grid
from lightrft.kernels.logprob.types import LogitsTransform, LogprobOutput

# A few big tiles: the interpreter pays for each.
TILES = TileConfig(128, 256, 64, 4, 2, tiles_per_split=2)
HARD = LogitsTransform(temperature=0.7, softcap=20.0)
PLAIN = LogitsTransform(1.0, None)
ENGINES = {"fused": TritonEngine(1024, TILES, TILES), "products": ProductEngine(1024)}


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


def inputs(num_tokens, vocab, *, size=72, **more):
    return make_inputs(num_tokens, vocab, size=size, **more)


def program_of(transform):
    return {"temperature": transform.temperature, "softcap": transform.softcap}


GRADIENT_BOUNDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def check(engine, leaves, targets, upstream, *, transform=HARD, value=5e-5, gradient=None):
    """Compare an engine with the float64 program."""
    hidden, weight, *bias = leaves
    output = engine_logprob(
        hidden, weight, bias[0] if bias else None, targets, engine, transform, "grad"
    )
    gradient = gradient or GRADIENT_BOUNDS[weight.dtype]
    if len(weight) == 1:  # no gradient but rounding
        gradient = 1.0
    outputs = (output.logprobs, output.entropy)
    compare(
        outputs, leaves, targets, upstream, value=value, gradient=gradient, **program_of(transform)
    )


def check_inside(engine, parts, budget, leaves, targets, upstream, entropy="grad", gradient=5e-6):
    """Compare a loss inside the output layer, of these rows, with the float64 program."""
    options = PolicyLossOptions(engine, weighted_tokens(upstream), parts, budget, entropy)
    loss, logprobs, *_ = LinearPolicyLoss.apply(*leaves, targets, HARD, options)
    rows = torch.cat(parts)
    kept = torch.zeros_like(upstream)
    kept[:, rows] = upstream[:, rows]
    compare(
        [logprobs] if len(rows) == len(targets) else [],
        leaves,
        targets,
        kept,
        value=5e-5,
        gradient=gradient,
        loss=loss,
        **program_of(HARD),
    )


SIZES = [(1, 255), (127, 256), (129, 257), (3, 1), (128, 1408)]
NO_BIAS = {"has_bias": False}
# Tokens, vocabulary, how inputs are made, and what is done to logits.
CASES = {
    **{f"{tokens} x {vocab}": (tokens, vocab, {}, HARD) for tokens, vocab in SIZES},
    **{f"{size} hidden": (20, 50, {"size": size}, HARD) for size in (9, 100)},
    **{
        f"temperature 0.01, softcap {softcap}": (20, 300, NO_BIAS, LogitsTransform(0.01, softcap))
        for softcap in (None, 5.0, 30.0)
    },
    "plain": (65, 700, NO_BIAS, PLAIN),
    "bfloat16": (128, 600, {"dtype": torch.bfloat16}, HARD),
}


by_every_engine = pytest.mark.parametrize("name", ENGINES)


@by_every_engine
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_float64(case, name):
    num_tokens, vocab, how, transform = CASES[case]
    leaves, targets, upstream = inputs(num_tokens, vocab, **how)
    targets[1::3], upstream[:, 2::5] = -100, 0.0
    check(ENGINES[name], leaves, targets, upstream, transform=transform)


@by_every_engine
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_forbidden_token_has_no_probability_and_no_gradient(name, softcap):
    leaves, targets, upstream = inputs(20, 300)
    leaves[2] = leaves[2].detach().index_fill(0, torch.tensor([5, 299]), -math.inf).requires_grad_()
    transform = LogitsTransform(0.7, softcap)
    check(ENGINES[name], leaves, targets.clamp(6, 298), upstream, transform=transform)


def test_float16_inputs_are_widened():
    check(ENGINES["products"], *inputs(128, 600, dtype=torch.float16))
    tensors = inputs(3, 5, dtype=torch.float16, has_bias=False)
    with pytest.raises(ValueError, match="both in float32 or both in bfloat16"):
        linear_logprob(*tensors[0], tensors[1], impl="triton")


@pytest.mark.parametrize("size", [1e-7, 1e5])
def test_float16_gradients_of_any_size(size):
    leaves, targets, upstream = inputs(32, 300, size=16, dtype=torch.float16, has_bias=False)
    output = engine_logprob(*leaves, None, targets, ENGINES["products"], PLAIN, "grad")
    loss = weighted((output.logprobs.float(), output.entropy.float()), upstream)
    got = torch.autograd.grad(loss * size, leaves)
    expected, doubles, _ = float64_program(leaves, targets)
    want = torch.autograd.grad(weighted(expected, upstream) * size, doubles)
    for value, reference in zip(got, want, strict=True):
        rounded = reference.half().double()
        if rounded.isfinite().all():
            # Stored in 16 bits once before: 1e-3 of the norm.
            rounding = float((rounded - reference).norm() / reference.norm())
            assert relative_error(value, reference) < 1.2 * rounding + 1e-3


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


def test_products_are_folded_by_enough_programs():
    # A block of 512 tokens and 16384 columns, the 32 MiB that are stored at a time.
    rows, columns = fold_grid(512, 16384)
    assert rows * columns >= 3 * 132


@by_every_engine
@pytest.mark.parametrize("shift", [-30.0, -150.0, 1e4, -1e4])
def test_the_running_maximum_starts_below_every_logit_and_no_column_is_a_phantom(name, shift):
    # Columns beyond the vocabulary read as 0 would hold nearly all the probability.
    leaves, targets, upstream = inputs(16, 600)
    leaves[2] = torch.full((600,), shift, requires_grad=True)
    check(ENGINES[name], leaves, targets, upstream, transform=PLAIN, gradient=2e-5)


# The sum of weights, 1 + 1e-6, is itself a multiple of 2^-23; and the interpreter adds columns one
# by one, where each of those terms is lost.
@pytest.mark.parametrize(
    "name, certainty, relative",
    [("fused", 1e-3, 0.01), ("fused", 1e-6, 0.1), ("products", 1e-3, 0.01)],
)
def test_near_certain_target_keeps_its_gradient(name, certainty, relative):
    weight = torch.zeros(20, 16, requires_grad=True)
    hidden = torch.zeros(4, 16)
    bias = torch.zeros(20)
    bias[7] = math.log(19 / certainty)
    bias.requires_grad_()
    output = engine_logprob(hidden, weight, bias, torch.full((4,), 7), ENGINES[name], PLAIN, "none")
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


@pytest.mark.parametrize("budget", [0, 2**31])
def test_loss_inside_the_output_layer(budget):
    check_inside(ENGINES["products"], torch.arange(70).split((40, 30)), budget, *inputs(70, 600))


class Recording(ProductEngine):
    """Keeps the numbers of rows of all products."""

    def products(self, hidden, chunk):
        SEEN.append(len(hidden))
        return super().products(hidden, chunk)


SEEN = []


@pytest.mark.parametrize("counts", [(70,), (40, 30), (1,), (16, 17)])
def test_b1_rows_of_zeros_fill_a_loss_up_to_whole_vectors(counts):
    SEEN.clear()
    parts = torch.arange(sum(counts)).split(counts)
    check_inside(Recording(512), parts, 2**31, *inputs(70, 600))
    assert SEEN
    assert all(number % 16 == 0 for number in SEEN)


@pytest.mark.parametrize("counts", [(70,), (40, 30)])
def test_b2_one_chunk_writes_the_gradient_of_a_bfloat16_weight_rounded_once(counts):
    leaves, targets, upstream = inputs(70, 600, dtype=torch.bfloat16)
    upstream[1] = 0
    parts = torch.arange(70).split(counts)
    # A rounding to bfloat16 is 2^-9 of each number.
    check_inside(
        ENGINES["products"], parts, 2**31, leaves, targets, upstream, "none", gradient=3e-3
    )


def test_a_split_weight_gives_float32_logprobs_and_gradients():
    leaves, targets, upstream = inputs(60, 700, has_bias=False)
    leaves[0] = leaves[0].detach().bfloat16().requires_grad_()
    engine = ProductEngine(512, splits_weight=True)
    output = engine_logprob(*leaves, None, targets, engine, PLAIN, "none")
    (exact, _), doubles, _ = float64_program(leaves, targets)
    assert (output.logprobs - exact).abs().max() < 5e-5
    results = torch.autograd.grad(output.logprobs, leaves, upstream[0])
    wanted = torch.autograd.grad(exact, doubles, upstream[0].double())
    assert [gradient.dtype for gradient in results] == [torch.bfloat16, torch.float32]
    # Gradients of logits in bfloat16; that of hidden is rounded once more.
    assert relative_error(results[1], wanted[1]) < 4e-3
    assert relative_error(results[0], wanted[0]) < 8e-3


def test_no_row_at_all():
    (hidden, weight, bias), targets, _ = inputs(5, 30)
    output = linear_logprob(
        hidden, weight, torch.full_like(targets, -100), bias=bias, entropy="grad", impl="triton"
    )
    loss = output.logprobs.sum() + output.entropy.sum()
    assert all(not g.any() for g in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_float64_is_refused():
    (hidden, weight, _), targets, _ = inputs(4, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match="impl='triton' is not available here: it needs hidden"):
        linear_logprob(hidden, weight, targets, impl="triton")
