"""Low-rank adapters that an engine holds beside its weights, y = W x + B (A x).

Their scale is part of the engine's B: the engine applies B exactly as it receives and hashes it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightrft.engines.nf4 import NF4Linear
from lightrft.engines.types import AdapterShape, EngineParameter

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"


def holds_adapters(manifest: Iterable[EngineParameter]) -> bool:
    """Return whether an engine with these parameters takes adapters beside the base weights."""
    return any(parameter.name.endswith(SECOND) for parameter in manifest)


def add_adapters(model: nn.Module, adapters: AdapterShape) -> set[str]:
    """Add A and B, of the layer's dtype and device, to linear layers of a model in place.

    Returns:
        Names of the parameters, which are uninitialised.

    Raises:
        TypeError: A layer is not linear.
    """
    names = set()
    for name in adapters.layers:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear | NF4Linear):
            raise TypeError(
                f"adapters need linear layers: {name} of {type(model).__name__} is a "
                f"{type(layer).__name__}; merge them: lora_sync merged"
            )
        dtype = layer.dtype if isinstance(layer, NF4Linear) else layer.weight.dtype
        device = next(layer.parameters()).device
        for factor, (inner, outer) in {
            FIRST: (layer.in_features, adapters.rank),
            SECOND: (adapters.rank, layer.out_features),
        }.items():
            # On meta, so that it draws nothing from the global generator.
            made = nn.Linear(inner, outer, bias=False, device="meta", dtype=dtype)
            made = made.to_empty(device=device).requires_grad_(False)
            layer.add_module(factor.split(".")[1], made)
            names.add(name + factor)
        layer.register_forward_hook(add_adapter)
    return names


def add_adapter(
    layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """Add the product of a layer's factors and its input to its output."""
    added: torch.Tensor = layer.get_submodule("lora_B")(layer.get_submodule("lora_A")(inputs[0]))
    return output + added
