"""Parameters sharded by FSDP2, read shard by shard without gathering any."""

from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    checkpoint_module,
    chunk_ranges,
    reshard_modules,
    sharded_source,
    whole_parameter,
)


def fsdp2_parameter_source(module: nn.Module) -> ParameterSource:
    """The source of a model wrapped by `fully_shard`, on a flat or hybrid mesh.

    Side effect: units that are unsharded between forwards are resharded, because their registered
    parameters are temporary copies until then.

    Args:
        module: The wrapped actor or bare model.

    Raises:
        ValueError: A parameter is sharded along another dimension than its first, or over more
            than one mesh dimension, or two parameters are sharded over different ranks.
    """
    reshard_modules(module)
    root = checkpoint_module(module)
    entries = [_entry(name, parameter) for name, parameter in root.named_parameters()]
    return sharded_source(module, root, entries)


def _shard_group(name: str, parameter: DTensor) -> ProcessGroup:
    """The ranks of the one mesh dimension over which the parameter is sharded."""
    placements = parameter.placements
    sharded_dims = [dim for dim, place in enumerate(placements) if not place.is_replicate()]
    if len(sharded_dims) != 1 or placements[sharded_dims[0]] != Shard(0):
        raise ValueError(
            f"a parameter must be sharded once, along its first dimension: got {placements} for "
            f"{name!r}; leave shard_placement_fn unset"
        )
    return parameter.device_mesh.get_group(sharded_dims[0])


def _entry(name: str, parameter: Tensor) -> tuple[SourceParameter, ProcessGroup | None]:
    if not isinstance(parameter, DTensor):
        return whole_parameter(name, parameter), None
    group = _shard_group(name, parameter)
    local = cast("DTensor", parameter.detach()).to_local()
    shards = chunk_ranges(tuple(parameter.shape), dist.get_world_size(group))
    start, stop = shards[dist.get_rank(group)]
    if local.numel() != stop - start or not local.is_contiguous():
        raise ValueError(
            f"the shard of {name!r} must be the contiguous range [{start}, {stop}) of shape "
            f"{tuple(parameter.shape)}: got a shard of shape {tuple(local.shape)}"
        )
    entry = SourceParameter(
        checkpoint_name=name,
        shape=tuple(parameter.shape),
        shards=shards,
        local_shard=local.view(-1),
        frozen=not parameter.requires_grad,
        is_aliasable=len(shards) == 1,
    )
    return entry, group
