"""Layers of 4 bits in training: quantised from files, and dequantised for files and engines."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightrft.engines.nf4 import (
    BLOCK,
    CODES,
    SCALES,
    NF4Linear,
    names_in_files,
    quantized,
    quantized_layers,
)
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    local_rank_in,
    local_rows,
    tied_parameter_names,
)


@torch.no_grad()
def fill(layer: NF4Linear, weight: Tensor) -> None:
    """Store what this rank holds of a weight in 4 bits.

    Raises:
        ValueError: The weight is not finite.
    """
    for name, values in quantized(weight).items():
        local, start, stop = local_rows(getattr(layer, name).detach())
        local.copy_(values[start:stop])


def quantize_layers(model: nn.Module, layers: Iterable[str], dtype: torch.dtype) -> None:
    """Replace linear layers of a model, one after the other, except those with a shared weight.

    One without memory is filled later.
    """
    tied = tied_parameter_names(model)
    shared = {*tied, *tied.values()}
    for name in layers:
        layer = model.get_submodule(name)
        if is_product(layer) and f"{name}.weight" not in shared:
            packed = NF4Linear(layer, dtype)
            if not layer.weight.is_meta:
                fill(packed, layer.weight)
            model.set_submodule(name, packed)


@torch.no_grad()
def is_product(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Try whether a layer multiplies by its weight: some linear classes route or form groups."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return isinstance(layer, nn.Linear)
    # Numbers that need no memory: the layer's may be large, or have none yet.
    values = {
        name: torch.linspace(-1, 2, value.shape[-1], device="cpu").expand(value.shape)
        for name, value in layer.named_parameters()
    }
    rows = torch.linspace(0, 1, 2 * layer.in_features, device="cpu").view(2, -1)
    try:
        product = nn.functional.linear(rows, *values.values())
        return torch.allclose(functional_call(layer, values, rows), product, rtol=1e-3)
    except Exception:  # noqa: BLE001  the class's own code
        return False


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
