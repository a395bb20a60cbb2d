"""Checks, once in a process and device, of what a library or compiler may get wrong."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch

from lightrft.kernels.logprob.product_engine import ProductEngine
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer

if TYPE_CHECKING:
    from lightrft.kernels.logprob.tiles import TileConfig

_ROWS = 256
_HIDDEN = 256
_COLUMNS = 1000
_MAX_CENTRED_ERROR = 3e-2
_MEAN_CENTRED_ERROR = 2e-3
_MAX_EXACT_ERROR = 5e-5


@cache
def centred_products_are_right(device: torch.device) -> bool:
    """Whether the subtraction in a product's epilogue happens before the rounding to bfloat16."""
    hidden, layer, targets, expected = _problem(device, torch.bfloat16)
    engine = ProductEngine(_COLUMNS, is_centred=True, uses_triton=False)
    rows = engine.statistics(hidden, layer, targets, needs_entropy=False)
    error = (rows.logprobs.double() - expected).abs()
    return bool(error.max() <= _MAX_CENTRED_ERROR and error.mean() <= _MEAN_CENTRED_ERROR)


@cache
def working_bulk_tiles(
    device: torch.device, dtype: torch.dtype, is_plain: bool
) -> TileConfig | None:
    """The first tiles with bulk copies that compile here and give exact logprobs, or None."""
    from lightrft.kernels.logprob import triton_launch
    from lightrft.kernels.logprob.tiles import GRADIENT_SM90, bulk_tiles
    from lightrft.kernels.logprob.triton_engine import TritonEngine

    hidden, layer, targets, expected = _problem(device, dtype)
    capability = torch.cuda.get_device_capability(device)
    for tiles in bulk_tiles(capability, triton_launch.triton_version(), is_plain=is_plain):
        engine = TritonEngine(_COLUMNS, tiles, GRADIENT_SM90)
        try:
            rows = engine.statistics(hidden, layer, targets, needs_entropy=not is_plain)
            largest = float((rows.logprobs.double() - expected).abs().max())
        except Exception as err:  # noqa: BLE001 - any compiler failure has the same remedy
            reason = f"{type(err).__name__}: {err}"
        else:
            if largest <= _MAX_EXACT_ERROR:
                return tiles
            reason = f"its logprobs are off by {largest:.1e}"
        warnings.warn(f"{tiles} are not used: {reason}", RuntimeWarning, stacklevel=2)
    return None


def _problem(
    device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, OutputLayer, torch.Tensor, torch.Tensor]:
    """(hidden, layer, targets, float64 logprobs) with logits of standard deviation 9."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator)
    weight = torch.randn(_COLUMNS, _HIDDEN, generator=generator) * (9 / _HIDDEN**0.5)
    probabilities = torch.softmax(hidden @ weight.T, 1)
    targets = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    hidden, weight, targets = hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)
    log_probabilities = torch.log_softmax(hidden.double() @ weight.double().T, 1)
    expected = log_probabilities.gather(1, targets[:, None]).squeeze(1)
    return hidden, OutputLayer(weight, None, LogitsTransform(1.0, None)), targets, expected
