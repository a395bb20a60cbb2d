"""Launches of the Triton kernels: grids, strides and flags from tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton  # noqa: TID253 - only this engine imports this module
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: TID253

from lightrft.kernels.logprob import triton_kernels
from lightrft.kernels.logprob.rows import RowStatistics

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.kernels.logprob.rows import GradRows
    from lightrft.kernels.logprob.tiles import TileConfig
    from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer

_ROW_BLOCK = 128
_EPILOGUE_ROWS = 64
_EPILOGUE_COLUMNS = 64
COLUMNS_PER_SPLIT = 1024


def triton_version() -> tuple[int, int]:
    """Major and minor version of Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on host memory."""
    return not isinstance(triton_kernels.forward_partials, triton.JITFunction)


@dataclass(slots=True)
class Partials:
    """Statistics of splits of the vocabulary before they are merged: [2 or 3, splits, rows]."""

    values: Tensor
    needs_entropy: bool

    @classmethod
    def allocate(
        cls, num_splits: int, num_rows: int, like: Tensor, *, needs_entropy: bool
    ) -> Partials:
        """Memory for `num_splits` splits, to be written completely."""
        shape = (3 if needs_entropy else 2, num_splits, num_rows)
        return cls(torch.empty(shape, dtype=torch.float32, device=like.device), needs_entropy)

    def merge(self, target_logits: Tensor) -> RowStatistics:
        """Row statistics in natural units, merged in the order of splits."""
        _, num_splits, num_rows = self.values.shape
        maximum, exp_sum, weighted_sum = self.values.new_zeros((3, num_rows)).unbind()
        triton_kernels.merge_partials[(triton.cdiv(num_rows, _ROW_BLOCK),)](
            self.values, maximum, exp_sum, weighted_sum, num_rows, num_splits,
            NEEDS_ENTROPY=self.needs_entropy, BLOCK_ROWS=_ROW_BLOCK,
        )  # fmt: skip
        return RowStatistics(maximum, exp_sum, weighted_sum, target_logits)


def forward_partials(
    hidden: Tensor, layer: OutputLayer, tiles: TileConfig, *, needs_entropy: bool
) -> Partials:
    """Statistics of every split of the vocabulary: the products never leave the chip."""
    num_rows, size = hidden.shape
    num_columns = len(layer.weight)
    num_splits = triton.cdiv(num_columns, tiles.block_columns * tiles.tiles_per_split)
    partials = Partials.allocate(num_splits, num_rows, hidden, needs_entropy=needs_entropy)
    num_tiles = triton.cdiv(num_rows, tiles.block_rows) * num_splits
    scale, softcap, flags = law_arguments(layer)
    bias = hidden if layer.bias is None else layer.bias
    common = {
        "NEEDS_ENTROPY": needs_entropy, "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_COLUMNS": tiles.block_columns, "BLOCK_SIZE": tiles.block_size,
        "GROUP": tiles.group, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        **flags,
    }  # fmt: skip
    if tiles.uses_tma:
        num_programs = min(num_tiles, _num_programs(hidden))
        triton_kernels.forward_partials_tma[(num_programs,)](
            TensorDescriptor.from_tensor(hidden, [tiles.block_rows, tiles.block_size]),
            TensorDescriptor.from_tensor(layer.weight, [tiles.block_columns, tiles.block_size]),
            bias, partials.values, num_rows, num_columns, size, num_splits, num_programs,
            scale, softcap, WARP_SPECIALIZE=tiles.is_specialized, **common,
        )  # fmt: skip
        return partials
    triton_kernels.forward_partials[(num_tiles,)](
        hidden, layer.weight, bias, partials.values, num_rows, num_columns, size, num_splits,
        hidden.stride(0), layer.weight.stride(0), scale, softcap, UPCAST=is_interpreted(),
        TILES_PER_SPLIT=tiles.tiles_per_split, **common,
    )  # fmt: skip
    return partials


def target_products(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """hidden[row] . weight[targets[row]] in float32, 0 where the target is outside: [rows]."""
    num_rows, size = hidden.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    block_rows = _ROW_BLOCK if is_interpreted() else 4
    triton_kernels.target_products[(triton.cdiv(num_rows, block_rows),)](
        hidden, weight, targets, out, num_rows, len(weight), size, hidden.stride(0),
        weight.stride(0), BLOCK_ROWS=block_rows, BLOCK_SIZE=256,
    )  # fmt: skip
    return out


def fold_products(
    products: Tensor, layer: OutputLayer, centre: Tensor | None, partials: Partials,
    *, first_row: int, first_split: int,
) -> None:  # fmt: skip
    """Writes the statistics of products [columns, rows] to their place in `partials`."""
    num_columns, num_rows = products.shape
    _, total_splits, total_rows = partials.values.shape
    scale, softcap, flags = law_arguments(layer)
    grid = (
        triton.cdiv(num_rows, _EPILOGUE_ROWS), triton.cdiv(num_columns, COLUMNS_PER_SPLIT)
    )  # fmt: skip
    triton_kernels.fold_products[grid](
        products, products if layer.bias is None else layer.bias,
        products if centre is None else centre, partials.values, num_rows, num_columns,
        products.stride(0), scale, softcap, first_row, total_rows, first_split, total_splits,
        HAS_CENTRE=centre is not None, NEEDS_ENTROPY=partials.needs_entropy,
        BLOCK_ROWS=_EPILOGUE_ROWS, BLOCK_COLUMNS=_EPILOGUE_COLUMNS,
        COLUMNS_PER_SPLIT=COLUMNS_PER_SPLIT, **flags,
    )  # fmt: skip


def grad_products(
    rows: GradRows, layer: OutputLayer, first_column: int, tiles: TileConfig
) -> Tensor:
    """Gradient of rows.hidden @ weight.T, recomputed: [rows, columns] in hidden's dtype."""
    hidden, weight = rows.hidden, layer.weight
    num_rows, num_columns = len(hidden), len(weight)
    # Rows are padded to whole 16-byte vectors, so that the products that follow can use them.
    padded = triton.cdiv(num_columns, 8) * 8
    out = torch.empty((num_rows, padded), dtype=hidden.dtype, device=hidden.device)
    out = out[:, :num_columns]
    if num_rows == 0:
        return out
    scale, softcap, flags = law_arguments(layer)
    num_tiles = triton.cdiv(num_rows, tiles.block_rows)
    num_tiles *= triton.cdiv(num_columns, tiles.block_columns)
    triton_kernels.grad_products[(num_tiles,)](
        hidden, weight, hidden if layer.bias is None else layer.bias, *_row_arguments(rows), out,
        num_rows, num_columns, hidden.shape[1], first_column, hidden.stride(0), weight.stride(0),
        out.stride(0), scale, softcap, **_gradient_flags(rows), UPCAST=is_interpreted(),
        BLOCK_ROWS=tiles.block_rows, BLOCK_COLUMNS=tiles.block_columns,
        BLOCK_SIZE=tiles.block_size, GROUP=tiles.group, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **flags,
    )  # fmt: skip
    return out


def grad_of_stored_products(
    products: Tensor, rows: GradRows, layer: OutputLayer, centre: Tensor | None,
    first_column: int,
) -> Tensor:  # fmt: skip
    """Gradient of products [columns, rows] in hidden's dtype; in place if that is theirs."""
    num_columns, num_rows = products.shape
    out = products
    if products.dtype != rows.hidden.dtype:
        out = torch.empty_like(products, dtype=rows.hidden.dtype)
    if num_rows == 0:
        return out
    scale, softcap, flags = law_arguments(layer)
    grid = (
        triton.cdiv(num_rows, _EPILOGUE_ROWS), triton.cdiv(num_columns, _EPILOGUE_COLUMNS)
    )  # fmt: skip
    triton_kernels.grad_of_stored_products[grid](
        products, products if layer.bias is None else layer.bias,
        products if centre is None else centre, *_row_arguments(rows), out, num_rows,
        num_columns, first_column, products.stride(0), scale, softcap,
        HAS_CENTRE=centre is not None, **_gradient_flags(rows), BLOCK_ROWS=_EPILOGUE_ROWS,
        BLOCK_COLUMNS=_EPILOGUE_COLUMNS, **flags,
    )  # fmt: skip
    return out


def law_arguments(layer: OutputLayer) -> tuple[float, float, dict[str, bool]]:
    """(1 / temperature, softcap or 1, compile-time flags)."""
    transform: LogitsTransform = layer.transform
    flags = {"HAS_BIAS": layer.bias is not None, "HAS_SOFTCAP": transform.softcap is not None}
    return 1.0 / transform.temperature, transform.softcap or 1.0, flags


def _row_arguments(rows: GradRows) -> tuple[Tensor, ...]:
    nothing = rows.maximum
    return (
        rows.targets, rows.maximum, rows.log_sum, rows.logprobs, rows.entropy,
        nothing if rows.grad_logprobs is None else rows.grad_logprobs,
        nothing if rows.grad_entropy is None else rows.grad_entropy,
    )  # fmt: skip


def _gradient_flags(rows: GradRows) -> dict[str, bool]:
    return {
        "HAS_GRAD_LOGPROB": rows.grad_logprobs is not None,
        "HAS_GRAD_ENTROPY": rows.grad_entropy is not None,
    }


def _num_programs(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        return 2
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
