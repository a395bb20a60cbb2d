"""A moving average in a checkpoint: flat ranges in float32, readable by any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from lightrft.strategy.checkpoints.client_state import CheckpointError
from lightrft.strategy.checkpoints.file_writers import FileWriter
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    local_rank_in,
)

FOLDER = "average"


class _Part(NamedTuple):
    file: Path
    start: int
    stop: int


def save_average(
    folder: Path,
    average: ParameterSource,
    values: Mapping[str, Tensor],
    files: FileWriter,
    *,
    rank: int,
) -> None:
    """Write this rank's ranges of an average; what every rank holds is written by the first.

    Args:
        folder: The checkpoint.
        average: Says which range of each parameter this rank holds.
        values: Those ranges as they are averaged, see `MovingAverages.values`.
        files: Writes the file.
        rank: This process.
    """
    parts: dict[str, Tensor] = {}
    layout: dict[str, list[object]] = {}
    for entry in average.parameters():
        start, stop = _own_range(average, entry)
        if start == stop or (rank > 0 and not entry.is_sharded):
            continue
        parts[entry.checkpoint_name] = values[entry.checkpoint_name]
        layout[entry.checkpoint_name] = [start, list(entry.shape)]
    (folder / FOLDER).mkdir(exist_ok=True)
    files.tensors(
        folder / FOLDER / f"rank_{rank:05d}.safetensors", parts, {"layout": json.dumps(layout)}
    )


def load_average(folder: Path, average: ParameterSource) -> dict[str, Tensor]:
    """This rank's ranges of an average, by parameter, as they were saved.

    Raises:
        CheckpointError: The checkpoint has no average, or one of another model.
    """
    found = sorted((folder / FOLDER).glob("rank_*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{folder} holds no moving average: it was saved by a run without one; continue "
            "without it, or start a new run"
        )
    parts: dict[str, list[_Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in found:
        with safe_open(file, "pt") as stream:
            for name, (start, shape) in json.loads(stream.metadata()["layout"]).items():
                size = stream.get_slice(name).get_shape()[0]
                parts.setdefault(name, []).append(_Part(file, start, start + size))
                shapes[name] = tuple(shape)
    values = {}
    for entry in average.parameters():
        name = entry.checkpoint_name
        if shapes.get(name, (0,)) != entry.shape and entry.numel > 0:
            raise CheckpointError(
                f"{name} has shape {shapes.get(name)} in the moving average of {folder}, expected "
                f"{entry.shape}"
            )
        values[name] = _read(name, parts.get(name, []), *_own_range(average, entry))
    return values


def _own_range(source: ParameterSource, entry: SourceParameter) -> tuple[int, int]:
    return entry.shards[local_rank_in(source.group) if entry.is_sharded else 0]


def _read(name: str, parts: list[_Part], start: int, stop: int) -> Tensor:
    """The range from start to stop, of parts that may overlap."""
    pieces = []
    position = start
    for part in sorted(parts, key=lambda item: item.start):
        if part.start <= position < min(part.stop, stop):
            end = min(part.stop, stop)
            with safe_open(part.file, "pt") as stream:
                pieces.append(stream.get_slice(name)[position - part.start : end - part.start])
            position = end
    if position != stop:
        raise CheckpointError(f"{name}: the moving average lacks elements {position} to {stop}")
    return torch.cat(pieces) if pieces else torch.empty(0)
