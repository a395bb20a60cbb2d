"""The C++ extension: pointers and sizes in, nothing of torch crosses the border."""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

# Must equal the extension's own; one built from other sources is not used.
INTERFACE_VERSION = 1

_SAME_DTYPE = 0
_CAST_CODES = {
    (torch.float32, torch.bfloat16): 1,
    (torch.float32, torch.float16): 2,
    (torch.bfloat16, torch.float32): 3,
    (torch.float16, torch.float32): 4,
}
_BYTES_PER_THREAD = 2**19


class Extension(Protocol):
    """What the compiled module `lightrft.kernels._native` offers."""

    interface_version: int
    has_cuda: bool
    device_tile_elements: int

    def copy_segments(
        self, segments: Sequence[tuple[int, int, int, int, int]], bf16_nan: int, num_threads: int
    ) -> None:
        """Copies segments (source, destination, numel, cast code, element bytes)."""

    def hash_range(
        self, pointer: int, numel: int, itemsize: int, start: int, num_threads: int
    ) -> int:
        """Hash of `numel` elements at `pointer`, the first of which has index `start`."""

    def launch_segments(
        self, segments: int, tile_segments: int, num_tiles: int, hashes: int, device: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Runs a table of device segments on a stream; only if `has_cuda`."""


@cache
def load_extension() -> Extension | None:
    """The compiled module, or None if it is not built or was built from other sources."""
    try:
        _native = importlib.import_module("lightrft.kernels._native")
        is_usable = _native.interface_version == INTERFACE_VERSION
    except (ImportError, AttributeError):
        return None
    return _native if is_usable else None


def can_copy(source: Tensor, dtype: torch.dtype) -> bool:
    """Whether `copy_segments` knows this cast of a contiguous tensor in host memory."""
    same = source.dtype == dtype
    is_host = source.device.type == "cpu" and source.is_contiguous()
    return is_host and (same or (source.dtype, dtype) in _CAST_CODES)


def copy_segments(
    extension: Extension,
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    *,
    num_threads: int,
) -> None:
    """Casts each flat source into its flat destination; arguments are already validated."""
    table = []
    num_bytes = 0
    for source, out in zip(sources, destinations, strict=True):
        code = _CAST_CODES.get((source.dtype, out.dtype), _SAME_DTYPE)
        table.append((source.data_ptr(), out.data_ptr(), source.numel(), code, out.element_size()))
        num_bytes += source.numel() * max(source.element_size(), out.element_size())
    extension.copy_segments(table, _bf16_nan_bits(), _choose_threads(num_threads, num_bytes))


def hash_flat(extension: Extension, tensor: Tensor, start: int, *, num_threads: int) -> int:
    """Hash of a contiguous host tensor; see `lightrft.kernels.hash_tensor`."""
    itemsize = tensor.element_size()
    threads = _choose_threads(num_threads, tensor.numel() * itemsize)
    return extension.hash_range(tensor.data_ptr(), tensor.numel(), itemsize, start, threads)


def _choose_threads(num_threads: int, num_bytes: int) -> int:
    limit = num_threads or torch.get_num_threads()
    return max(1, min(limit, num_bytes // _BYTES_PER_THREAD))


@cache
def _bf16_nan_bits() -> int:
    """The bits torch gives every NaN when it casts to bfloat16; they depend on the CPU."""
    nan = torch.full((64,), float("nan")).to(torch.bfloat16)
    return int(nan.view(torch.int16)[0].item()) & 0xFFFF
