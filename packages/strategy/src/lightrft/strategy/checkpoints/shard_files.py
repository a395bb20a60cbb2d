"""Sharded tensors on disk: one safetensors file per rank, readable by any number of ranks."""

import json
from collections.abc import Container, Mapping
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrft.config.files import make_folder, regular_file
from lightrft.strategy.checkpoints.files import FileWriter, StoredTensor
from lightrft.strategy.distributed.collectives import ALONE, nonfinite_names, require_finite
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.weight_sync.parameter_source import local_rows


class Shard(NamedTuple):
    """Rows of a tensor, or elements of a flattened one, and the shape of the whole."""

    rows: Tensor
    start: int
    shape: tuple[int, ...]


def own_shards(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Shard]:
    """Return this rank's parts of tensors that every rank names alike; replicas count once."""
    shards = {}
    for name, tensor in tensors.items():
        local, start, stop = local_rows(tensor.detach())
        is_empty = tensor.dim() > 0 and start == stop and tensor.shape[0] > 0
        if not is_empty and is_written_by(tensor, rank):
            shards[name] = Shard(local, start, tuple(tensor.shape))
    return shards


def write_shards(
    folder: Path,
    shards: Mapping[str, Shard],
    files: FileWriter,
    *,
    rank: int,
    buffers: Container[str] = (),
) -> None:
    """Write a rank's file of a folder, which is created if needed.

    Args:
        folder, shards, files, rank: Target, content, writer, and rank of the file.
        buffers: Names of shards whose values need not be finite.

    Raises:
        NonFiniteError: Another shard holds an infinity or NaN.
    """
    trained = (
        (f"{folder.name}/{name}", shard.rows)
        for name, shard in shards.items()
        if name not in buffers
    )
    require_finite(nonfinite_names(trained), what="the checkpoint is", group=ALONE)
    make_folder(folder)
    # Sorted, so that equal states are equal files: a loaded optimizer has its states in this order.
    parts = {name: shards[name].rows for name in sorted(shards)}
    layout = {name: [shards[name].start, list(shards[name].shape)] for name in sorted(shards)}
    files.tensors(folder / f"rank_{rank:05d}.safetensors", parts, {"layout": json.dumps(layout)})


class ShardReader:
    """All tensors of a folder that `write_shards` filled.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: There are no files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The first row of each part, with the part.
        self._parts: dict[str, list[tuple[int, StoredTensor]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        files = sorted(folder.glob("rank_*.safetensors"))
        if not files:
            raise CheckpointError(f"no shards in {folder}")
        for file in files:
            with safe_open(regular_file(file), "pt") as stream:
                for name, (start, shape) in json.loads(stream.metadata()["layout"]).items():
                    part = StoredTensor(file, name, tuple(stream.get_slice(name).get_shape()))
                    self._parts.setdefault(name, []).append((start, part))
                    self._shapes[name] = tuple(shape)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes)

    def read_into(
        self, name: str, target: Tensor, start: int, stop: int, shape: tuple[int, ...]
    ) -> None:
        """Fill `target` with the rows [start, stop) of a tensor of this shape.

        Raises:
            CheckpointError: The shapes differ, or rows are missing.
        """
        saved_shape = self.shape_of(name)
        if saved_shape != shape:
            raise CheckpointError(
                f"{name} has shape {saved_shape} in the checkpoint, expected {shape}"
            )
        if not target.dim():
            target.copy_(self._parts[name][0][1].read())
            return
        position = start
        for first, part in sorted(self._parts[name], key=itemgetter(0)):  # they may overlap
            end = min(first + part.shape[0], stop)
            if first <= position < end:
                rows = part.read(slice(position - first, end - first))
                target[position - start : end - start].copy_(rows)
                position = end
        if position != stop:
            raise CheckpointError(f"{name}: the checkpoint lacks the rows {position} to {stop}")

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor was written."""
        self.shape_of(name)  # raises if there is none
        return self._parts[name][0][1].read(slice(0)).dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        if name not in self._shapes:
            raise CheckpointError(f"{self._folder} lacks {name}")
        return self._shapes[name]


def is_written_by(tensor: Tensor, rank: int) -> bool:
    """Return whether this rank writes its part into a checkpoint."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    layout = zip(coordinate, tensor.placements, strict=True)
    return not any(rank for rank, place in layout if place.is_replicate())


def full_value(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank. Collective for a sharded one."""
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole
