"""Weights, masters, optimizer states and schedule of a DeepSpeed engine as files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lightrft.strategy.checkpoints.client_state import CheckpointError, save_scheduler
from lightrft.strategy.checkpoints.file_writers import FileWriter
from lightrft.strategy.checkpoints.gathered_model import WeightFiles, as_saved, check_names
from lightrft.strategy.deepspeed import runtime
from lightrft.strategy.weight_sync.parameter_source import tied_parameter_names

logger = logging.getLogger(__name__)

FOLDER = "deepspeed"


def save(
    folder: Path,
    engine: runtime.ZeroEngine,
    scheduler: LRScheduler | None,
    files: FileWriter,
    *,
    is_first: bool,
) -> None:
    """Write this rank's part of an engine, and on the first rank the schedule. Collective."""
    with runtime.saving_by(engine, files):
        engine.save_checkpoint(str(folder), FOLDER, {}, False)
    if scheduler is not None and is_first:
        save_scheduler(folder, scheduler, files)


def load(folder: Path, engine: runtime.ZeroEngine, *, strict: bool) -> None:
    """Read weights, masters and optimizer states of the same stage and number of ranks.

    Raises:
        CheckpointError: DeepSpeed found nothing.
        pickle.UnpicklingError: A file holds pickled code.
    """
    with runtime.weights_only_loading():
        path, _ = engine.load_checkpoint(
            str(folder), FOLDER, load_module_strict=strict, load_lr_scheduler_states=False
        )
    if path is None:
        raise CheckpointError(f"{folder} holds no DeepSpeed checkpoint")


def load_weights(folder: Path, engine: runtime.ZeroEngine, *, strict: bool) -> None:
    """Read only the weights, in float32, whatever number of ranks wrote them.

    Raises:
        RuntimeError: With `strict`, if names are missing or unexpected.
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
        RuntimeError: A shape differs, or with `strict` names are missing or unexpected.
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
    names, note = check_names(wanted, found - tied, source=source, strict=strict)
    if note is not None:
        logger.warning(note)
    buffers = dict(module.named_buffers())
    parameters = dict(module.named_parameters())
    for name in sorted(names):
        value = read(name)
        if name in buffers:
            buffers[name].data.copy_(value)
            continue
        shape = runtime.full_shape(parameters[name])
        if tuple(value.shape) != shape:
            raise RuntimeError(
                f"{name} has shape {tuple(value.shape)} in {source}, expected {shape}"
            )
        runtime.set_full_value(parameters[name], value)


def gather_module(module: nn.Module, dtype: torch.dtype, *, keeps: bool) -> dict[str, Tensor]:
    """Full CPU values, one parameter in flight at a time; tied ones once. Collective in stage 3.

    Args:
        module: The module inside the engine, or a plain one.
        dtype: Of the floating point values returned.
        keeps: Whether this rank wants them; the others return {}.
    """
    full: dict[str, Tensor] = {}
    saved_names = set(module.state_dict().keys())
    for name, parameter in module.named_parameters():
        with torch.no_grad(), runtime.gathered([parameter]):
            if keeps:
                full[name] = as_saved(parameter, dtype)
    for name, buffer in module.named_buffers():
        if keeps and name in saved_names:
            full[name] = as_saved(buffer, dtype)
    return full
