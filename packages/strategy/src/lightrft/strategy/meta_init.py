"""Building models whose parameters have no memory yet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_depth = [0]


@contextmanager
def parameters_on_meta(is_wanted: bool = True) -> Iterator[None]:
    """Take the memory of parameters that the body registers; buffers keep theirs.

    Buffers are small, and those that are not saved (rotary frequencies) are in no file.

    Args:
        is_wanted: False registers parameters with memory as usual, for parts of a model that are
            in no file.
    """
    original = nn.Module.register_parameter
    outer = _depth[0]

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and _depth[0] > 0:
            # Tied parameters stay tied: one that lost its memory is registered as it is.
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    _depth[0] = outer + 1 if is_wanted else 0
    if outer == 0 and is_wanted:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        _depth[0] = outer
        if outer == 0 and is_wanted:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def on_host(module: nn.Module) -> Iterator[None]:
    """Keep parameters without memory on the host inside: with a shape, and one number's memory."""
    empty = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for child, name, parameter in empty:
        value = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
        child.register_parameter(name, nn.Parameter(value, requires_grad=False))
    try:
        yield
    finally:
        for child, name, parameter in empty:
            child.register_parameter(name, parameter)


def is_building_on_meta() -> bool:
    """Return whether parameters that are registered now get no memory."""
    return _depth[0] > 0
