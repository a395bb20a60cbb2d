"""Weights of DeepSpeed engines, read and gathered."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft.strategy.checkpoints.files import CheckpointError
from lightrft.strategy.checkpoints.gathered_model import WeightFiles, check_names
from lightrft.strategy.deepspeed import runtime
from lightrft.strategy.weight_sync.parameter_source import tied_parameter_names

FOLDER = "deepspeed"


def load_weights(folder: Path, engine: runtime.ZeroEngine, *, strict: bool) -> None:
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
    """Full values, one parameter in flight at a time; tied ones once. Collective in stage 3.

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
    engine: runtime.ZeroEngine, optimizer: Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """`weight/NAME`, and with an optimizer that has stepped `KEY/NAME`. Collective.

    Args:
        engine: Of stage 1 to 3.
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
