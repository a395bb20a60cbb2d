"""What a machine and its compilers have to prove, once per process, before they are used."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.kernels.logprob.passes import LogprobEngine, chunks
from lightrft.kernels.logprob.product_engine import ProductEngine
from lightrft.kernels.logprob.rows import GradRows, RowStatistics
from lightrft.kernels.logprob.types import EntropyMode, LogitsTransform, OutputLayer

if TYPE_CHECKING:
    from lightrft.kernels.logprob.triton_launch import TileConfig

_TEST_ROWS = 256
_TEST_HIDDEN = 256
_TEST_COLUMNS = 1000
_MAX_CENTRED_ERROR = 3e-2
_MEAN_CENTRED_ERROR = 2e-3
_MAX_EXACT_ERROR = 5e-5
# Gradients are rounded once to bfloat16: 2^-9 of each at most.
_MAX_GRADIENT_ERROR = 4e-3


def run_once(
    engine: LogprobEngine, hidden: Tensor, layer: OutputLayer, entropy: EntropyMode
) -> tuple[RowStatistics, Tensor]:
    """What an engine computes of some tokens: statistics, and the gradient of one chunk of logits.

    Args:
        engine: It.
        hidden: [tokens, hidden].
        layer: At least one column; the targets are all its first one.
        entropy: As in `linear_logprob`; the upstream gradients are 1.
    """
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    rows = engine.statistics(hidden, layer, targets, needs_entropy=entropy != "none")
    ones = torch.ones_like(rows.maximum)
    known = GradRows(
        hidden.to(engine.product_dtype(hidden, layer.weight)),
        targets,
        rows.maximum,
        rows.log_sum,
        rows.logprobs,
        rows.entropy if entropy != "none" else rows.logprobs,
        ones,
        ones if entropy == "grad" else None,
    )
    _, _, chunk = next(chunks(layer, engine.chunk_columns, known.hidden.dtype))
    return rows, engine.grad_logits(known, chunk, 0)


@cache
def centred_products_are_right(device: torch.device) -> bool:
    """Whether the subtraction in a product's epilogue happens before the rounding to bfloat16."""
    hidden, layer, targets, expected = _problem(device, torch.bfloat16)
    engine = ProductEngine(_TEST_COLUMNS, is_centred=True, uses_triton=False)
    rows = engine.statistics(hidden, layer, targets, needs_entropy=False)
    error = (rows.logprobs.double() - expected).abs()
    return bool(error.max() <= _MAX_CENTRED_ERROR and error.mean() <= _MEAN_CENTRED_ERROR)


@cache
def working_bulk_tiles(
    device: torch.device, dtype: torch.dtype, is_plain: bool
) -> TileConfig | None:
    """The first tiles with bulk copies that compile here and give exact logprobs, or None."""
    from lightrft.kernels.logprob import triton_launch

    hidden, layer, targets, expected = _problem(device, dtype)
    capability = torch.cuda.get_device_capability(device)
    for tiles in triton_launch.bulk_tiles(
        capability, triton_launch.triton_version(), is_plain=is_plain
    ):
        engine = triton_launch.TritonEngine(_TEST_COLUMNS, tiles, triton_launch.PLAIN_SM90)
        try:
            rows = engine.statistics(hidden, layer, targets, needs_entropy=True)
            largest = float((rows.logprobs.double() - expected).abs().max())
        except Exception as err:  # noqa: BLE001 - any compiler failure has the same remedy
            reason = f"{type(err).__name__}: {err}"
        else:
            if largest <= _MAX_EXACT_ERROR:
                return tiles
            reason = f"its logprobs are off by {largest:.1e}"
        warnings.warn(f"{tiles} are not used: {reason}", RuntimeWarning, stacklevel=2)
    return None


@cache
def working_bulk_gradient_tiles(
    device: torch.device, dtype: torch.dtype, is_plain: bool
) -> TileConfig | None:
    """Tiles with bulk copies of the backward pass, if they give exact gradients here, or None."""
    from lightrft.kernels.logprob import triton_launch

    capability = torch.cuda.get_device_capability(device)
    tiles = triton_launch.bulk_gradient_tiles(capability, is_plain=is_plain)
    if tiles is None:
        return None
    plain = triton_launch.plain_tiles(capability, is_half=True, is_aligned=True)
    engine = triton_launch.TritonEngine(_TEST_COLUMNS, plain, tiles)
    try:
        error = gradient_error(engine, device, dtype)
    except Exception as err:  # noqa: BLE001 - any compiler failure has the same remedy
        reason = f"{type(err).__name__}: {err}"
    else:
        if error <= _MAX_GRADIENT_ERROR:
            return tiles
        reason = f"its gradients are off by {error:.1e} of their norm"
    warnings.warn(f"{tiles} are not used: {reason}", RuntimeWarning, stacklevel=2)
    return None


def gradient_error(engine: LogprobEngine, device: torch.device, dtype: torch.dtype) -> float:
    """Distance of an engine's gradients of logits from float64, relative to their norm."""
    hidden, layer, _, _ = _problem(device, dtype)
    _, found = run_once(engine, hidden, layer, "none")
    exact = -torch.softmax(hidden.double() @ layer.weight.double().T, 1)
    exact[:, 0] += 1
    return float((found.double() - exact).norm() / exact.norm())


def _problem(
    device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, OutputLayer, torch.Tensor, torch.Tensor]:
    """(hidden, layer, targets, float64 logprobs) with logits of standard deviation 9."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TEST_ROWS, _TEST_HIDDEN, generator=generator)
    weight = torch.randn(_TEST_COLUMNS, _TEST_HIDDEN, generator=generator) * (9 / _TEST_HIDDEN**0.5)
    probabilities = torch.softmax(hidden @ weight.T, 1)
    targets = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    hidden, weight, targets = hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)
    log_probabilities = torch.log_softmax(hidden.double() @ weight.double().T, 1)
    expected = log_probabilities.gather(1, targets[:, None]).squeeze(1)
    return hidden, OutputLayer(weight, None, LogitsTransform(1.0, None)), targets, expected
