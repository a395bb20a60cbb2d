"""Frozen linear layers whose weights are stored in 4 bits (NF4), by bitsandbytes.

    w = code * absmax,  absmax = table[scale] * range + mean

A block of 64 weights has a float `absmax` and a code of 4 bits each, one of 16 quantiles of the
normal distribution. The absmax less their mean are in turn codes of 8 bits, with one float32 range
for every 256: 4.13 bits a weight in all.

Source: Dettmers et al. 2023, arXiv:2305.14314, sec. 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from lightrft.engines.libraries import check_library

if TYPE_CHECKING:
    from types import ModuleType

BLOCK, BLOCKS_PER_RANGE = 64, 256
CODES, SCALES, RANGES = "codes", "scales", "ranges"


class NF4Linear(nn.Module):
    """Frozen linear layer with a weight of 4 bits.

    The weight is dequantised for each pass, and again in the backward pass. Codes and scales are
    parameters with a row for each block, so that ranks can shard them alike. Floats lie in a
    buffer of bytes, which no change of dtype rounds.

    Args:
        layer: Layer to replace; its weight is not read.
        dtype: Type to which a weight is rounded once before it is used, here and in engines.

    Attributes:
        codes: [blocks, 32] uint8, two codes each.
        scales: [blocks] uint8.
        ranges: Bytes of a float32 for every 256 blocks, and of the mean.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    ranges: Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = (
            layer.in_features,
            layer.out_features,
            dtype,
        )
        num_blocks = -(-self.size // BLOCK)
        for name, shape in ((CODES, (num_blocks, BLOCK // 2)), (SCALES, (num_blocks,))):
            value = torch.empty(shape, dtype=torch.uint8, device=layer.weight.device)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        num_floats = -(-num_blocks // BLOCKS_PER_RANGE) + 1
        self.register_buffer(RANGES, torch.zeros(4 * num_floats, dtype=torch.uint8))
        self.bias = layer.bias

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return self.out_features, self.in_features

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.out_features * self.in_features

    @property
    def weight(self) -> Tensor:
        """The whole weight, for code that does not call the layer."""
        return self.dense(self.codes, self.scales)

    def dense(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the weight of all codes and scales, [out, in]."""
        return self.values(codes, scales, 0)[: self.size].view(self.shape)

    def values(self, codes: Tensor, scales: Tensor, first: int) -> Tensor:
        """Return the weights of some blocks, flat.

        Args:
            codes, scales: Rows of the blocks.
            first: Number of the first of them.
        """
        floats = self.ranges.to(codes.device).view(torch.float32)
        begin, skipped = divmod(first, BLOCKS_PER_RANGE)
        stop = begin - -(skipped + len(scales)) // BLOCKS_PER_RANGE
        ranges = floats[begin:stop].repeat_interleave(BLOCKS_PER_RANGE)[skipped:][: len(scales)]
        # As bitsandbytes rounds: the product, then the sum.
        absmax = (
            table_8bit(codes.device).index_select(0, scales.int()).mul_(ranges).add_(floats[-1])
        )
        shape = (len(scales) * BLOCK,)
        flat = codes.reshape(-1, 1)
        dequantize = torch.ops.bitsandbytes.dequantize_4bit
        return cast("Tensor", dequantize(flat, absmax, BLOCK, "nf4", shape, self.dtype)).view(-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs times the weight, plus the bias."""
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        return cast("Tensor", _Product.apply(inputs, self, self.codes, self.scales))  # type: ignore[no-untyped-call, unused-ignore]


class _Product(torch.autograd.Function):
    """Product with a weight that is dequantised anew in the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, inputs: Tensor, layer: NF4Linear, codes: Tensor, scales: Tensor
    ) -> Tensor:
        ctx.layer = layer  # type: ignore[attr-defined]
        ctx.save_for_backward(codes, scales)
        bias = None if layer.bias is None else layer.bias.to(inputs.dtype)
        return functional.linear(inputs, layer.dense(codes, scales).to(inputs.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight = ctx.layer.dense(*ctx.saved_tensors)  # type: ignore[attr-defined]
        return gradient @ weight.to(gradient.dtype), None, None, None


@cache
def bitsandbytes() -> ModuleType:
    """Return the functions of bitsandbytes.

    Raises:
        ImportError: It is not installed, or lacks one that is needed.
    """
    from bitsandbytes import functional as functions

    check_library("bitsandbytes")
    return cast("ModuleType", functions)


@cache
def table_8bit(device: torch.device, *, signed: bool = True) -> Tensor:
    """Return the numbers of the codes of 8 bits, [256] float32."""
    return cast("Tensor", bitsandbytes().create_dynamic_map(signed)).to(device)


@torch.no_grad()
def quantized(weight: Tensor) -> dict[str, Tensor]:
    """Return codes, scales and ranges of a whole weight, by their names in the layer.

    Raises:
        ValueError: A weight is not finite.
    """
    if not weight.isfinite().all():
        raise ValueError("quantize nf4: a weight of the model is infinite or NaN: give another")
    flat = weight.flatten().float()
    # Zeros change no code and no absmax of the last block.
    flat = functional.pad(flat, (0, -flat.numel() % BLOCK))
    codes, state = bitsandbytes().quantize_4bit(
        flat, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    floats = torch.cat([state.state2.absmax, state.offset.view(1)])
    return {
        CODES: codes.view(-1, BLOCK // 2),
        SCALES: state.absmax,
        RANGES: floats.view(torch.uint8),
    }


def pack_layers(model: nn.Module, layers: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Give linear layers of a model 4 bits a weight; return names of tensors that are not set."""
    names = list(layers)
    for name in names:
        model.set_submodule(name, NF4Linear(cast("nn.Linear", model.get_submodule(name)), dtype))
    return {f"{name}.{part}" for name in names for part in (CODES, SCALES, RANGES)}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, tied ones under each name, and the ranges of layers of 4 bits."""
    layers = quantized_layers(model).items()
    ranges = {f"{name}.{RANGES}": layer.ranges for name, layer in layers}
    return {**dict(model.named_parameters(remove_duplicate=False)), **ranges}


def quantized_layers(module: nn.Module) -> dict[str, NF4Linear]:
    """Return the layers of 4 bits by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, NF4Linear)}


def names_in_files(module: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Yield names of tensors as files have them: one weight where codes and scales are."""
    layers = quantized_layers(module)
    for name in names:
        layer, _, last = name.rpartition(".")
        if layer not in layers or last == "bias":
            yield name
        elif last == CODES:
            yield f"{layer}.weight"
