"""Sharded tensors on disk: one safetensors file per rank, readable by any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from lightrft.strategy.checkpoints.client_state import CheckpointError
from lightrft.strategy.checkpoints.file_writers import FileWriter
from lightrft.strategy.fsdp2.sharding import is_written_by, local_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], files: FileWriter, *, rank: int
) -> None:
    """Write this rank's parts of all tensors; replicas are written once.

    Args:
        folder: Created if needed; each rank writes its own file there.
        tensors: Sharded or whole, with the same names on every rank.
        files: Writes the file.
        rank: This process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Tensor] = {}
    layout: dict[str, list[object]] = {}
    for name, tensor in tensors.items():
        local, start, stop = local_rows(tensor.detach())
        is_empty = tensor.dim() > 0 and start == stop and tensor.shape[0] > 0
        if is_empty or not is_written_by(tensor, rank):
            continue
        parts[name] = local
        layout[name] = [start, list(tensor.shape)]
    files.tensors(folder / f"rank_{rank:05d}.safetensors", parts, {"layout": json.dumps(layout)})


@dataclass(frozen=True, slots=True)
class _Part:
    file: Path
    start: int
    num_rows: int
    shape: tuple[int, ...]


class ShardReader:
    """All tensors of a folder that `write_shards` filled.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: There are no files.
    """

    def __init__(self, folder: Path) -> None:
        self._parts: dict[str, list[_Part]] = {}
        files = sorted(folder.glob("rank_*.safetensors"))
        if not files:
            raise CheckpointError(f"no shards in {folder}")
        for file in files:
            with safe_open(file, "pt") as stream:
                layout = json.loads(stream.metadata()["layout"])
                for name in stream.keys():  # noqa: SIM118  # not a mapping
                    start, shape = layout[name]
                    local_shape = stream.get_slice(name).get_shape()
                    num_rows = local_shape[0] if local_shape else 0
                    part = _Part(file, start, num_rows, tuple(shape))
                    self._parts.setdefault(name, []).append(part)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._parts)

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill this rank's part of `target`.

        Raises:
            CheckpointError: The shapes differ, or rows are missing.
        """
        parts = self._parts[name]
        if parts[0].shape != tuple(target.shape):
            raise CheckpointError(
                f"{name} has shape {parts[0].shape} in the checkpoint, expected "
                f"{tuple(target.shape)}"
            )
        local, start, stop = local_rows(target.detach())
        if not target.dim():
            local.copy_(_read(parts[0], name, None))
            return
        num_filled = 0
        for part in parts:
            low, high = max(start, part.start), min(stop, part.start + part.num_rows)
            if low < high:
                rows = _read(part, name, (low - part.start, high - part.start))
                local[low - start : high - start].copy_(rows)
                num_filled += high - low
        if num_filled != stop - start:
            raise CheckpointError(
                f"{name}: the checkpoint has {num_filled} of the rows {start} to {stop}"
            )

    def dtype_of(self, name: str) -> torch.dtype:
        """In which dtype a tensor was written."""
        part = self._parts[name][0]
        return _read(part, name, (0, 0) if part.shape else None).dtype


def _read(part: _Part, name: str, rows: tuple[int, int] | None) -> Tensor:
    with safe_open(part.file, "pt") as stream:
        if rows is None:
            whole: Tensor = stream.get_tensor(name)
            return whole
        selected: Tensor = stream.get_slice(name)[rows[0] : rows[1]]
        return selected
