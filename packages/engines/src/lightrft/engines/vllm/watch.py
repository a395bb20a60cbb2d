"""Outputs of the layers of a vLLM model, for a comparison with the trainer's."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

_LAYER = re.compile(r"^(?P<parts>(?:language_model\.)?model\.layers\.)(?P<number>\d+)$")


@contextmanager
def watched_layers(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collects what the layers of the language model give, call by call.

    Args:
        model: vLLM's.

    Yields:
        transformers' name of a layer -> [tokens, hidden] of each call. Empty where vLLM replays
        a recorded graph.
    """
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            del module, inputs
            # vLLM adds the residual in the next layer.
            parts = output if isinstance(output, tuple) else (output,)
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            if tensors:
                found.setdefault(name, []).append(torch.stack(tensors).sum(dim=0).cpu())

        return hook

    handles = []
    for name, module in model.named_modules():
        match = _LAYER.match(name)
        if match is not None:
            is_part = match["parts"].startswith("language_model")
            prefix = "model.language_model.layers." if is_part else "model.layers."
            handles.append(module.register_forward_hook(keep(prefix + match["number"])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
