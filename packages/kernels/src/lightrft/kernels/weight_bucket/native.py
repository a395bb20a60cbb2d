"""C++ extension, which takes addresses and sizes but no torch objects."""

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

# Must equal the extension's version; one built from other sources is not used.
INTERFACE_VERSION = 2

_SAME_DTYPE = 0
CAST_CODES = {
    (torch.float32, torch.bfloat16): 1,
    (torch.float32, torch.float16): 2,
    (torch.bfloat16, torch.float32): 3,
    (torch.float16, torch.float32): 4,
}
_BYTES_PER_THREAD = 2**19


class Move(NamedTuple):
    """Range of memory to copy or cast, hash, or both; arguments are already validated.

    Args:
        source: Address of the first element.
        destination: Address of the contiguous destination; 0 if it is only hashed.
        num_rows, row_elements: Number of rows, and of elements in each.
        row_stride: Elements of the source from one row to the next.
        source_dtype, dtype: dtypes before and after.
        start: Index of the first element in its full tensor.
    """

    source: int
    destination: int
    num_rows: int
    row_elements: int
    row_stride: int
    source_dtype: torch.dtype
    dtype: torch.dtype
    start: int


@cache
def load_extension() -> ModuleType | None:
    """Return the compiled module (`_native.pyi`); None if not built, or from other sources."""
    try:
        _native = importlib.import_module("lightrft.kernels._native")
        is_usable = _native.interface_version == INTERFACE_VERSION
    except (ImportError, AttributeError):
        return None
    return _native if is_usable else None


def can_run(moves: Sequence[Move]) -> bool:
    """Return whether `run` supports all moves: flat, with a known cast."""
    return all(
        move.num_rows == 1
        and (move.source_dtype == move.dtype or (move.source_dtype, move.dtype) in CAST_CODES)
        for move in moves
    )


def run(extension: ModuleType, moves: Sequence[Move], hashes: Tensor | None) -> None:
    """Run moves in host memory.

    Args:
        extension: Compiled module.
        moves: Moves on the host.
        hashes: [moves] int64, to which the signed hash of each, after the cast, is added.
    """
    table = []
    num_bytes = 0
    for source, destination, _, numel, _, source_dtype, dtype, start in moves:
        itemsize = dtype.itemsize
        code = CAST_CODES.get((source_dtype, dtype), _SAME_DTYPE)
        table.append((source, destination, numel, code, itemsize, start))
        num_bytes += numel * max(source_dtype.itemsize, itemsize)
    threads = max(1, min(torch.get_num_threads(), num_bytes // _BYTES_PER_THREAD))
    hash_values = extension.run_segments(table, _bf16_nan_bits(), threads, hashes is not None)
    if hashes is not None:
        hashes += torch.tensor(hash_values, dtype=torch.int64)


@cache
def _bf16_nan_bits() -> int:
    """Return the bits of every NaN that torch casts to bfloat16, which depend on the CPU."""
    nan = torch.full((64,), float("nan")).to(torch.bfloat16)
    return int(nan.view(torch.int16)[0].item()) & 0xFFFF
