"""Weights of DeepSpeed engines, read, gathered, and partition by partition without any gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightrft.strategy.checkpoints.gathered_model import WeightFiles, check_names
from lightrft.strategy.deepspeed import runtime
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    checkpoint_module,
    module_parameter_source,
    sharded_source,
    tied_parameter_names,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

FOLDER = "deepspeed"


def load_weights(folder: Path, engine: DeepSpeedEngine, *, strict: bool) -> None:
    """Read only the weights, in float32, whatever number of ranks wrote them.

    Raises:
        CheckpointError: With `strict`, if names are missing or unexpected.
    """
    if engine.zero_optimization_stage() == 0:
        with runtime.weights_only_loading():
            engine.load_checkpoint(
                str(folder), FOLDER, load_module_strict=strict, load_module_only=True
            )
        return
    full = runtime.read_full_weights(str(folder), FOLDER)
    _fill(engine.module, set(full), full.__getitem__, source=str(folder), strict=strict)


def load_full_weights(path: Path, module: nn.Module, *, strict: bool) -> None:
    """Read a Hugging Face checkpoint into parameters and masters. Collective in stage 3.

    Raises:
        FileNotFoundError: There are no weights.
        CheckpointError: A shape differs, or with `strict` names are missing or unexpected.
    """
    files = WeightFiles(path, module)

    def read(name: str) -> Tensor:
        shape = files.shape(name)
        return files.rows(name, 0, shape[0] if shape else 0)

    _fill(module, files.names, read, source=str(path), strict=strict)


def _fill(
    module: nn.Module, found: set[str], read: Callable[[str], Tensor], *, source: str, strict: bool
) -> None:
    tied = set(tied_parameter_names(module))
    wanted = set(module.state_dict().keys()) - tied
    buffers = dict(module.named_buffers())
    parameters = dict(module.named_parameters())
    for name in sorted(check_names(wanted, found - tied, source=source, strict=strict)):
        value = read(name)
        if name in buffers:
            buffers[name].data.copy_(value)
            continue
        shape = runtime.full_shape(parameters[name])
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(value.shape)} in {source}, expected {shape}"
            )
        runtime.set_full_value(parameters[name], value)


def full_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield full values, one parameter in flight at a time; tied ones once. Collective in stage 3.

    Args:
        module: The module inside the engine, or a plain one.
    """
    saved_names = set(module.state_dict().keys())
    for name, parameter in module.named_parameters():
        with torch.no_grad(), runtime.gathered([parameter]):
            yield name, parameter
    for name, buffer in module.named_buffers():
        if name in saved_names:
            yield name, buffer


def full_states(
    engine: DeepSpeedEngine, optimizer: Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weight/NAME`, and `KEY/NAME` if the optimizer has stepped. Collective.

    Args:
        engine: Engine of stage 1 to 3.
        optimizer: Its optimizer, whose states are those of flat parts.
    """
    module = engine.module
    states = [] if optimizer is None else [state for state in optimizer.state.values() if state]
    if states and not engine.zero_optimization_partition_weights():
        runtime.link_moments(engine)
    for name, parameter in module.named_parameters():
        master = runtime.full_master(parameter)
        if master is None:
            with torch.no_grad(), runtime.gathered([parameter]):
                yield f"weight/{name}", parameter
            continue
        yield f"weight/{name}", master
        for key in ("exp_avg", "exp_avg_sq") if states else ():
            value = runtime.full_moment(parameter, key)
            if value is not None:
                yield f"{key}/{name}", value
        if states and "step" in states[0]:
            yield f"step/{name}", torch.as_tensor(states[0]["step"], dtype=torch.float32)


def zero_parameter_source(engine: DeepSpeedEngine) -> ParameterSource:
    """Return the source of a model inside a DeepSpeed engine, at any ZeRO stage.

    Stages 0 to 2: the module's parameters, in the dtype the forward uses (with bf16 the
    rounded copies of the fp32 masters, refreshed at the end of every step). Stage 3: each rank's
    partition, padding cut off.

    Args:
        engine: Result of `deepspeed.initialize`.

    Raises:
        ValueError: Partitions lie on NVMe or are stored quantised, or differ in their ranks.
    """
    if not engine.zero_optimization_partition_weights():
        return module_parameter_source(engine.module)
    root = checkpoint_module(engine.module)
    entries = [_partitioned_parameter(name, value) for name, value in root.named_parameters()]
    return sharded_source(engine.module, root, entries)


def _partitioned_parameter(name: str, parameter: Tensor) -> tuple[SourceParameter, ProcessGroup]:
    group, shards = runtime.partitions(parameter)
    start, stop = shards[dist.get_rank(group)]
    partition = runtime.local_part(parameter)
    if partition.dtype != parameter.dtype or partition.numel() < stop - start:
        raise ValueError(
            f"the partition of {name!r} must be in memory as {parameter.dtype} with at least "
            f"{stop - start} elements: got {partition.numel()} of {partition.dtype}; do not use "
            "NVMe offload or quantised weights together with a rollout engine"
        )
    entry = SourceParameter(
        checkpoint_name=name,
        shape=runtime.full_shape(parameter),
        shards=shards,
        local_shard=partition.view(-1)[: stop - start],
        frozen=not parameter.requires_grad,
    )
    return entry, group
