"""Outputs of the modules of a model during one call."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


@torch.no_grad()
def module_outputs(model: nn.Module, call: Callable[[], object]) -> dict[str, Tensor]:
    """Return module name -> output during a call, in the order in which modules finished."""
    outputs: dict[str, Tensor] = {}
    modes = [(module, module.training) for module in model.modules()]

    def watcher(name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            del module, inputs
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Tensor) and value.is_floating_point():
                outputs.setdefault(name, value.detach())

        return keep

    handles = [
        module.register_forward_hook(watcher(name)) for name, module in model.named_modules()
    ]
    model.eval()
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return outputs
