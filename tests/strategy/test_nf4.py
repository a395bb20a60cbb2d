"""Layers of 4 bits beside bitsandbytes' and beside a slow quantiser in float64."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, pad

from lightrft.engines.nf4 import BLOCK, BLOCKS_PER_RANGE, NF4Linear
from lightrft.strategy.nf4 import fill, quantize_layers

functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
# Quantiles of the normal distribution, table of appendix E of the paper.
QUANTILES = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
# Whole blocks, a last one that is cut, rows that begin inside of blocks, several ranges.
SHAPES = [(64, 64), (3, 21), (5, 33), (1, 31), (129, 200)]


def layer_of(shape, dtype=torch.float32, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(shape[1], shape[0], bias=bias)
    layer.weight.data = torch.randn(shape, generator=generator) * 0.02
    made = NF4Linear(layer.requires_grad_(False), dtype)
    fill(made, layer.weight)
    return layer, made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_weights_are_those_of_bitsandbytes(shape, dtype):
    layer, made = layer_of(shape, dtype)
    codes, state = functional.quantize_4bit(
        layer.weight.to(dtype), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    fill(made, layer.weight.to(dtype))
    num_pairs = layer.weight.numel() // 2
    assert torch.equal(made.codes.flatten()[:num_pairs], codes.flatten()[:num_pairs])
    assert torch.equal(made.scales, state.absmax)
    floats = torch.cat([state.state2.absmax, state.offset.view(1)])
    assert torch.equal(made.ranges.view(torch.float32), floats)
    # Rows of an odd length are compiled by bitsandbytes, which takes seconds.
    state.shape = torch.Size([1, 2 * codes.numel()])
    flat = functional.dequantize_4bit(codes, state).to(dtype).flatten()
    assert torch.equal(made.weight.flatten(), flat[: layer.weight.numel()])


def in_blocks(values):
    """[blocks, 64] float64, zeros at the end."""
    return pad(values.double().flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_the_nearest_quantiles_and_weights_their_multiples(shape):
    layer, made = layer_of(shape)
    exact, quantiles = in_blocks(layer.weight), torch.tensor(QUANTILES, dtype=torch.float64)
    absmax = exact.abs().amax(1, keepdim=True)
    nearest = (exact[..., None] / absmax[..., None] - quantiles).abs().argmin(-1)
    codes = made.codes.int().flatten()
    assert torch.equal(torch.stack([codes >> 4, codes & 15], -1).view(nearest.shape), nearest)
    weights, values = in_blocks(made.weight), quantiles[nearest]
    scales = weights.abs().amax(1, keepdim=True) / values.abs().amax(1, keepdim=True)
    torch.testing.assert_close(weights, values * scales, rtol=1e-6, atol=0)
    mean = absmax.mean()
    for part, own in zip(
        absmax.split(BLOCKS_PER_RANGE), scales.split(BLOCKS_PER_RANGE), strict=True
    ):
        # Codes of 8 bits lie at most 0.015 apart.
        assert (own - part).abs().max() <= 0.0075 * (part - mean).abs().max() + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_are_those_of_the_dequantised_weight(dtype):
    _, made = layer_of((24, 40), dtype)
    inputs = torch.randn(2, 5, 40, dtype=dtype, requires_grad=True)
    output = made(inputs)
    weight, upstream = made.weight.double(), torch.randn_like(output)
    exact = inputs.detach().double().requires_grad_()
    expected = linear(exact, weight, made.bias.double())
    expected.backward(upstream.double())
    output.backward(upstream)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for one, other in ((output, expected), (inputs.grad, exact.grad)):
        assert (one.double() - other).norm() <= tolerance * other.norm()
    assert all(parameter.grad is None for parameter in made.parameters())


def test_a_pass_keeps_no_whole_weight():
    _, made = layer_of((512, 512), bias=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made(torch.randn(1, 512, requires_grad=True))
    assert {t.dtype for t in saved} == {torch.uint8}
    assert sum(t.nbytes for t in saved) <= 0.52 * 512 * 512
    stored = [*made.parameters(), *made.buffers()]
    assert sum(t.nbytes for t in stored) * 8 == pytest.approx(4.127 * 512 * 512, rel=1e-3)


def test_a_change_of_dtype_rounds_nothing():
    _, made = layer_of((64, 200))
    before = made.weight
    assert torch.equal(made.to(torch.bfloat16).weight, before)


def test_layers_that_share_a_weight_or_compute_otherwise_stay_as_they_are():
    class Other(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    model = nn.ModuleDict({n: nn.Linear(64, 64) for n in "abc"} | {"d": Other(64, 64)})
    model["b"].weight = model["a"].weight
    quantize_layers(model, list("abcd"), torch.float32)
    assert [isinstance(model[name], NF4Linear) for name in "abcd"] == [False, False, True, False]


def test_a_weight_that_is_not_finite_is_refused():
    layer, made = layer_of((64, 64))
    layer.weight.data[3, 4] = float("inf")
    with pytest.raises(ValueError, match="infinite or NaN"):
        fill(made, layer.weight)
