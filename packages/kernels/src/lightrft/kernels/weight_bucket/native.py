"""The C++ extension: addresses and sizes in, nothing of torch crosses the border."""

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

# Must equal the extension's own; one built from other sources is not used.
INTERFACE_VERSION = 2

_SAME_DTYPE = 0
_CAST_CODES = {
    (torch.float32, torch.bfloat16): 1,
    (torch.float32, torch.float16): 2,
    (torch.bfloat16, torch.float32): 3,
    (torch.float16, torch.float32): 4,
}
_BYTES_PER_THREAD = 2**19


class Move(NamedTuple):
    """A range of memory to be copied or cast, hashed, or both; arguments are already validated.

    Args:
        source: Address of the first element.
        destination: Where it goes, contiguous; 0 if it is only hashed.
        num_rows, row_elements: Elements, row by row.
        row_stride: Elements of the source from one row to the next.
        source_dtype, dtype: Before and after.
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
    """The compiled module (`_native.pyi`); None if it is not built, or from other sources."""
    try:
        _native = importlib.import_module("lightrft.kernels._native")
        is_usable = _native.interface_version == INTERFACE_VERSION
    except (ImportError, AttributeError):
        return None
    return _native if is_usable else None


def can_run(moves: Sequence[Move]) -> bool:
    """Whether `run` knows all of them: flat, with a known cast."""
    return all(
        move.num_rows == 1
        and (move.source_dtype == move.dtype or (move.source_dtype, move.dtype) in _CAST_CODES)
        for move in moves
    )


def run(extension: ModuleType, moves: Sequence[Move], hashes: Tensor | None) -> None:
    """Runs moves in host memory.

    Args:
        extension: The compiled module.
        moves: All on the host.
        hashes: [moves] int64; the signed hash of each, after the cast, is added.
    """
    table = []
    num_bytes = 0
    for source, destination, _, numel, _, source_dtype, dtype, start in moves:
        itemsize = dtype.itemsize
        code = _CAST_CODES.get((source_dtype, dtype), _SAME_DTYPE)
        table.append((source, destination, numel, code, itemsize, start))
        num_bytes += numel * max(source_dtype.itemsize, itemsize)
    threads = max(1, min(torch.get_num_threads(), num_bytes // _BYTES_PER_THREAD))
    found = extension.run_segments(table, _bf16_nan_bits(), threads, hashes is not None)
    if hashes is not None:
        hashes += torch.tensor(found, dtype=torch.int64)


@cache
def _bf16_nan_bits() -> int:
    """The bits torch gives every NaN when it casts to bfloat16; they depend on the CPU."""
    nan = torch.full((64,), float("nan")).to(torch.bfloat16)
    return int(nan.view(torch.int16)[0].item()) & 0xFFFF
