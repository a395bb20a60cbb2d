"""Parameters held by a DeepSpeed engine, read partition by partition without gathering any."""

from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor, dtype
from torch.distributed import ProcessGroup

from lightrft.strategy.deepspeed.runtime import ZeroEngine
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    checkpoint_module,
    chunk_ranges,
    module_parameter_source,
    sharded_source,
)


class _PartitionedParameter(Protocol):
    """Attributes that stage 3 gives a parameter."""

    requires_grad: bool
    dtype: dtype
    ds_shape: tuple[int, ...]
    ds_numel: int
    ds_tensor: Tensor
    ds_process_group: ProcessGroup


def zero_parameter_source(engine: ZeroEngine) -> ParameterSource:
    """The source of a model inside a DeepSpeed engine, at any ZeRO stage.

    Stages 0 to 2: the module's own parameters, in the dtype the forward uses (with bf16 the
    rounded copies of the fp32 masters, refreshed at the end of every step). Stage 3: each rank's
    partition, padding cut off.

    Args:
        engine: What `deepspeed.initialize` returned.

    Raises:
        ValueError: Partitions lie on NVMe or are stored quantised, or differ in their ranks.
    """
    if not engine.zero_optimization_partition_weights():
        return module_parameter_source(engine.module)
    root = checkpoint_module(engine.module)
    entries = [
        _partitioned_parameter(name, cast("_PartitionedParameter", parameter))
        for name, parameter in root.named_parameters()
    ]
    return sharded_source(engine.module, root, entries)


def _partitioned_parameter(
    name: str, parameter: _PartitionedParameter
) -> tuple[SourceParameter, ProcessGroup]:
    group = parameter.ds_process_group
    # Equal partitions of the flat tensor, padded to a multiple of the ranks.
    shards = chunk_ranges((parameter.ds_numel,), dist.get_world_size(group))
    start, stop = shards[dist.get_rank(group)]
    partition = parameter.ds_tensor.detach()
    if partition.dtype != parameter.dtype or partition.numel() < stop - start:
        raise ValueError(
            f"the partition of {name!r} must be in memory as {parameter.dtype} with at least "
            f"{stop - start} elements: got {partition.numel()} of {partition.dtype}; do not use "
            "NVMe offload or quantised weights together with a rollout engine"
        )
    entry = SourceParameter(
        checkpoint_name=name,
        shape=tuple(parameter.ds_shape),
        shards=shards,
        local_shard=partition.view(-1)[: stop - start],
        frozen=not parameter.requires_grad,
    )
    return entry, group
