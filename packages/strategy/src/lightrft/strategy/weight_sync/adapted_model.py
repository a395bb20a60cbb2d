"""Models that train additions to frozen weights, as weight sync and export see them."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightrft.strategy.weight_sync.parameter_source import ParameterSource


@runtime_checkable
class AdaptedModel(Protocol):
    """A wrapper whose weights are a stored base plus trained adapters."""

    def merged_source(self, source: ParameterSource) -> ParameterSource:
        """The parameters under the names of the base model, with the adapters in `add_local`.

        Collective over the source's group.
        """
        ...

    def merged_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full values with the adapters added to the weights, under the base model's names."""
        ...


def engine_source(module: nn.Module, source: ParameterSource) -> ParameterSource:
    """The source as a rollout engine needs it: adapters are part of the weights they change."""
    return module.merged_source(source) if isinstance(module, AdaptedModel) else source


def gathered_dtype(module: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are gathered for a file of `dtype`: adapters are added first."""
    return torch.float32 if isinstance(module, AdaptedModel) else dtype


def exported_state(
    module: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """The values of a file: adapters merged and rounded once.

    Args:
        module: The wrapper or bare model.
        state: Full CPU values by name in `module`, in `gathered_dtype`.
        dtype: Of the floating point values of the file.
    """
    if not isinstance(module, AdaptedModel):
        return state
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in module.merged_state(state).items()
    }
