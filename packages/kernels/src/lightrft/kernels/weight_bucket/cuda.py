"""Device buckets: a table of segments and one launch for all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from lightrft.kernels.weight_bucket.native import CAST_CODES, Move

# Codes of copies, and before those of casts.
_COPY_CODES = {1: 0, 2: 1, 4: 2, 8: 3}
_FIRST_CAST = 3
_ROW_WORDS = 12


def can_run(moves: Sequence[Move]) -> bool:
    """Return whether one launch supports all moves: known casts."""
    return all(_operation(move) is not None for move in moves)


def run(
    extension: ModuleType, device: torch.device, moves: Sequence[Move], hashes: Tensor | None
) -> None:
    """Run moves in device memory in one launch, queued on the current stream.

    Args:
        extension: Compiled module, built with CUDA.
        device: GPU of the moves.
        moves: Moves on the GPU.
        hashes: [moves] int64 on the GPU, to which the hash of each is added.
    """
    words, num_tiles = build_table(moves, extension.device_tile_elements)
    if num_tiles == 0:
        return
    # The table lives only as long as the launch needs it: torch reuses pinned blocks when the copy
    # is done, and device blocks when the stream reaches this point. A cache of tables would not
    # help a model with more buckets than its size.
    table = torch.frombuffer(words, dtype=torch.int64)
    stream = 0
    if device.type == "cuda":
        pinned = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
        table = pinned.copy_(table).to(device, non_blocking=True)
        stream = torch.cuda.current_stream(device).cuda_stream
    extension.launch_segments(
        table.data_ptr(),
        table.numel() // _ROW_WORDS,
        num_tiles,
        0 if hashes is None else hashes.data_ptr(),
        device.index or 0,
        stream,
    )


def build_table(moves: Sequence[Move], tile_elements: int) -> tuple[array[int], int]:
    """Return the rows of csrc/bucket.cuh and the number of tiles, without empty moves.

    Tiles are numbered consecutively over all segments.
    """
    words = array("q")
    num_tiles = 0
    for slot, move in enumerate(moves):
        num_rows, row_elements = move.num_rows, move.row_elements
        operation = _operation(move)
        if num_rows * row_elements == 0:
            continue
        if operation is None:
            raise ValueError(f"no device cast from {move.source_dtype} to {move.dtype}")
        words.extend(
            (
                move.source,
                move.destination,
                num_rows,
                row_elements,
                move.row_stride,
                row_elements,
                row_elements,
                move.start,
                operation,
                num_tiles,
                slot,
                0,
            )
        )
        num_tiles += -(-num_rows * row_elements // tile_elements)
    return words, num_tiles


def _operation(move: Move) -> int | None:
    if move.source_dtype == move.dtype:
        return _COPY_CODES.get(move.dtype.itemsize)
    code = CAST_CODES.get((move.source_dtype, move.dtype))
    return None if code is None else _FIRST_CAST + code
