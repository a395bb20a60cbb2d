"""Frozen linear layers whose weights are stored in 4 bits (NF4), by bitsandbytes.

    w = code * absmax,  absmax = table[scale] * range + mean

A block of 64 weights has a float `absmax` and a code of 4 bits each, one of 16 quantiles of the
normal distribution. The absmax less their mean are in turn codes of 8 bits, with one float32 range
for every 256: 4.13 bits a weight in all.

Source: Dettmers et al. 2023, arXiv:2305.14314, sec. 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from lightrft.engines.libraries import check_library
from lightrft.strategy.checkpoints.shard_files import local_rows
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    local_rank_in,
    tied_parameter_names,
)

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
        layer: Layer to replace. One without memory is quantised later.
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
        if not layer.weight.is_meta:
            self.quantize(layer.weight)

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

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        """Fill this rank's blocks from the whole weight.

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
        for target, values in (
            (self.codes, codes.view(-1, BLOCK // 2)),
            (self.scales, state.absmax),
        ):
            local, start, stop = local_rows(target.detach())
            local.copy_(values[start:stop])
        floats = torch.cat([state.state2.absmax, state.offset.view(1)])
        self.ranges.copy_(floats.view(torch.uint8))

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
        places = torch.arange(first, first + len(scales), device=codes.device) // BLOCKS_PER_RANGE
        absmax = table_8bit(codes.device)[scales.int()] * floats[places] + floats[-1]
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


def quantize_layers(model: nn.Module, layers: Iterable[str], dtype: torch.dtype) -> None:
    """Replace linear layers of a model, one after the other, except those with a shared weight."""
    tied = tied_parameter_names(model)
    shared = {*tied, *tied.values()}
    for name in layers:
        layer = model.get_submodule(name)
        # A class with another product keeps its weight.
        is_plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        if is_plain and f"{name}.weight" not in shared:
            model.set_submodule(name, NF4Linear(cast("nn.Linear", layer), dtype))


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


def dequantized_source(model: nn.Module, source: ParameterSource, left_out: str) -> ParameterSource:
    """Return a source with a weight in place of the codes and scales of a layer.

    Such a weight is 0 until `add_local` adds it.

    Args:
        model: Model with the layers.
        source: Parameters of the model.
        left_out: Part of names that files do not have.
    """
    layers, rank = quantized_layers(model), local_rank_in(source.group)
    stored = {entry.checkpoint_name: entry for entry in source.entries}
    entries, shards = [], {}
    for name in names_in_files(model, stored):
        plain = name.replace(left_out, "")
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None or name in stored:
            entries.append(replace(stored[name], checkpoint_name=plain))
            continue
        codes, scales = (stored[name.removesuffix("weight") + e] for e in (CODES, SCALES))
        ranges = [(min(2 * a, layer.size), min(2 * b, layer.size)) for a, b in codes.shards]
        start, stop = ranges[rank if codes.is_sharded else 0]
        # One number's memory.
        zeros = torch.zeros(1, device=codes.local_shard.device).expand(stop - start)
        entries.append(SourceParameter(plain, layer.shape, tuple(ranges), zeros, codes.frozen))
        packed = codes.local_shard.view(-1, BLOCK // 2)
        shards[plain] = layer, packed, scales.local_shard, start // BLOCK

    def add_local(name: str, start: int, values: Tensor) -> None:
        if name not in shards:
            return
        layer, codes, scales, shard_first = shards[name]
        first, stop = start // BLOCK, -(-(start + len(values)) // BLOCK)
        rows = slice(first - shard_first, stop - shard_first)
        dense = layer.values(codes[rows], scales[rows], first)
        values.add_(dense[start - first * BLOCK :][: len(values)].to(values.device))

    return replace(source, entries=tuple(entries), add_local=add_local if shards else None)


def dequantized(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield full values by names of files: a weight in place of codes and scales."""
    layers = quantized_layers(module)
    for name in names_in_files(module, state):
        prefix = name.removesuffix("weight")
        layer = layers.get(prefix[:-1])
        if layer is None or name in state:
            yield name, state[name]
        else:
            yield name, layer.dense(*(state[prefix + each] for each in (CODES, SCALES)))
