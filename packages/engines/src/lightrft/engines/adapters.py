"""Low-rank adapters that an engine holds beside its weights, y = W x + B (A x).

Their scale is part of the engine's B: what it is sent, stores and hashes is what it applies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightrft.engines.types import AdapterShape, EngineParameter

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"


def holds_adapters(manifest: Iterable[EngineParameter]) -> bool:
    """Whether an engine with these parameters takes adapters as they are, beside the base."""
    return any(parameter.name.endswith(SECOND) for parameter in manifest)


def add_adapters(model: nn.Module, adapters: AdapterShape) -> set[str]:
    """Gives linear layers of a model A and B, in place; they have the layer's dtype and device.

    Returns:
        Names of the parameters, which hold no numbers yet.

    Raises:
        TypeError: A layer is no linear one.
    """
    names = set()
    for name in adapters.layers:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise TypeError(
                f"adapters need linear layers: {name} of {type(model).__name__} is a "
                f"{type(layer).__name__}; merge them: lora_sync merged"
            )
        for factor, (inner, outer) in {
            FIRST: (layer.in_features, adapters.rank),
            SECOND: (adapters.rank, layer.out_features),
        }.items():
            # Made on meta, it draws nothing from the global generator.
            made = nn.Linear(inner, outer, bias=False, device="meta", dtype=layer.weight.dtype)
            made = made.to_empty(device=layer.weight.device).requires_grad_(False)
            layer.add_module(factor.split(".")[1], made)
            names.add(name + factor)
        layer.register_forward_hook(add_adapter)
    return names


def add_adapter(
    layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """Add what the two factors of a layer make of its input to its output."""
    added: torch.Tensor = layer.get_submodule("lora_B")(layer.get_submodule("lora_A")(inputs[0]))
    return output + added
