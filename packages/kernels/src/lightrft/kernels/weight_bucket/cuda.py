"""Device buckets: a table of segments, cached on the GPU, and one launch for all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.kernels.weight_bucket.native import Extension

_COPY_CODES = {1: 0, 2: 1, 4: 2, 8: 3}
_CAST_CODES = {
    (torch.float32, torch.bfloat16): 4,
    (torch.float32, torch.float16): 5,
    (torch.bfloat16, torch.float32): 6,
    (torch.float16, torch.float32): 7,
}
_MAX_TABLES = 256


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """Segments of one launch, in device memory.

    Args:
        segments: [segments, 12] int64, the rows of csrc/bucket.cuh.
        tile_segments: [tiles] int32, the segment of every tile.
    """

    segments: Tensor
    tile_segments: Tensor

    def to(self, device: torch.device) -> DeviceTable:
        """A copy on another device."""
        return DeviceTable(self.segments.to(device), self.tile_segments.to(device))


_tables: OrderedDict[tuple[object, ...], DeviceTable] = OrderedDict()


def can_run(sources: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """Whether one launch can do all of it: one GPU, known casts."""
    devices = {tensor.device for tensors in (sources, outs) for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return False
    return all(
        _operation(source.dtype, out.dtype) is not None
        for source, out in zip(sources, outs, strict=True)
    )


def run(
    extension: Extension,
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    starts: Sequence[int] | None = None,
    hashes: Tensor | None = None,
) -> None:
    """Copies or casts every source into its output, and hashes what is stored, in one launch.

    Args:
        extension: Built with CUDA.
        sources: Contiguous, or rows of a matrix; on one GPU.
        outs: Contiguous, of the same number of elements.
        starts: Index of each segment's first element in its full tensor.
        hashes: [segments] int64 on the GPU; each segment's hash is added.
    """
    rows = segment_rows(sources, outs, starts)
    if not rows:
        return
    device = outs[0].device
    table = _table(rows, device, extension.device_tile_elements)
    _launch(extension, table, hashes)


def hash_flat(extension: Extension, tensor: Tensor, start: int) -> int:
    """Hash of a contiguous device tensor; waits for the result."""
    hashes = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    if tensor.numel() > 0:
        flat = tensor.view(-1)
        operation = _COPY_CODES[flat.dtype.itemsize]
        row = (flat.data_ptr(), 0, 1, flat.numel(), 0, 0, 0, start, operation, 0, 0, 0)
        # Not cached: temporary tensors would fill the cache.
        table = build_table([row], extension.device_tile_elements).to(flat.device)
        _launch(extension, table, hashes)
    return int(hashes.item())


def _launch(extension: Extension, table: DeviceTable, hashes: Tensor | None) -> None:
    device = table.segments.device
    extension.launch_segments(
        table.segments.data_ptr(),
        table.tile_segments.data_ptr(),
        table.tile_segments.numel(),
        0 if hashes is None else hashes.data_ptr(),
        device.index,
        torch.cuda.current_stream(device).cuda_stream,
    )


def segment_rows(
    sources: Sequence[Tensor], outs: Sequence[Tensor], starts: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Rows of the table but for their tiles; empty segments are left out."""
    rows: list[tuple[int, ...]] = []
    for slot, (source, out) in enumerate(zip(sources, outs, strict=True)):
        if source.numel() == 0:
            continue
        num_rows, row_elements, stride = 1, source.numel(), 0
        if not source.is_contiguous():
            num_rows, row_elements = source.shape
            stride = source.stride(0)
        operation = _operation(source.dtype, out.dtype)
        if operation is None:
            raise ValueError(f"no device cast from {source.dtype} to {out.dtype}")
        start = 0 if starts is None else starts[slot]
        rows.append(
            (source.data_ptr(), out.data_ptr(), num_rows, row_elements, stride, row_elements,
             row_elements, start, operation, 0, slot, 0)
        )  # fmt: skip
    return rows


def build_table(rows: Sequence[tuple[int, ...]], tile_elements: int) -> DeviceTable:
    """The table in host memory: tiles are numbered through all segments in their order."""
    segments = torch.tensor(rows, dtype=torch.int64)
    num_tiles = (segments[:, 2] * segments[:, 3] + tile_elements - 1) // tile_elements
    segments[:, 9] = num_tiles.cumsum(0) - num_tiles
    numbers = torch.arange(len(rows), dtype=torch.int32)
    return DeviceTable(segments, numbers.repeat_interleave(num_tiles))


def _table(rows: list[tuple[int, ...]], device: torch.device, tile_elements: int) -> DeviceTable:
    """The table on the device; pointers of a training run are stable, so it is sent once."""
    key = (device, *rows)
    table = _tables.get(key)
    if table is None:
        table = _tables[key] = build_table(rows, tile_elements).to(device)
        if len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return table


def _operation(source: torch.dtype, out: torch.dtype) -> int | None:
    if source == out:
        return _COPY_CODES.get(source.itemsize)
    return _CAST_CODES.get((source, out))
