"""Logprobs by fused Triton kernels: tile shapes, launches, and the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # noqa: TID253 - only this engine imports this module
from torch import Tensor

from lightrft.kernels.logprob import triton_kernels
from lightrft.kernels.logprob.rows import GradRows, RowStatistics, finish_target_logits
from lightrft.kernels.logprob.types import OutputLayer

EPILOGUE_BLOCK = {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64}
MERGE_BLOCK = {"BLOCK_ROWS": 32, "BLOCK_SPLITS": 32}
TARGET_BLOCK = {"BLOCK_ROWS": 4, "BLOCK_SIZE": 256}
# Each program costs time in the interpreter.
_INTERPRETED_TARGET_BLOCK = {"BLOCK_ROWS": 128, "BLOCK_SIZE": 256}
# Few columns per program, so that a block of products gives each core several programs.
COLUMNS_PER_SPLIT = 256


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile shape of one product kernel.

    Args:
        block_rows, block_columns, block_size: Tile size in rows, vocabulary and hidden size.
        num_warps, num_stages: Warps of a program and depth of its software pipeline.
        tiles_per_split: Vocabulary tiles that one program merges in registers.
        group: Row blocks that share a panel of the weight.
    """

    block_rows: int
    block_columns: int
    block_size: int
    num_warps: int
    num_stages: int
    tiles_per_split: int = 4
    group: int = 8


PLAIN_SM80 = TileConfig(128, 128, 32, 8, 3)
PLAIN_SM90 = TileConfig(128, 128, 64, 8, 3)
PLAIN_SM100 = TileConfig(128, 128, 64, 8, 2)
# Gradients with more than a product and a target have registers for half as many rows.
HEAVY_SM80 = TileConfig(64, 128, 32, 8, 3)
HEAVY_SM90 = TileConfig(64, 128, 64, 8, 3)
# Float32 operands take twice the memory on the chip.
FLOAT32 = TileConfig(64, 64, 32, 8, 2)
FLOAT32_SM120 = TileConfig(64, 32, 32, 8, 2)
# Rows that do not start at multiples of 16 bytes are loaded element by element: many pointers.
UNALIGNED = TileConfig(64, 64, 32, 8, 2)


def plain_tiles(capability: tuple[int, int], *, is_half: bool, is_aligned: bool) -> TileConfig:
    """Return the tiles of a forward product with plain loads on a GPU of this capability.

    Args:
        capability: Compute capability of the GPU.
        is_half: Whether operands have 16 bits instead of 32.
        is_aligned: Whether their rows start at multiples of 16 bytes.
    """
    if not is_half:
        return FLOAT32_SM120 if capability >= (12, 0) else FLOAT32
    if not is_aligned:
        return UNALIGNED
    if not _has_big_memory(capability):
        return PLAIN_SM80
    return PLAIN_SM100 if capability >= (10, 0) else PLAIN_SM90


def gradient_tiles(
    capability: tuple[int, int], *, is_half: bool, is_aligned: bool, is_plain: bool
) -> TileConfig:
    """Return the tiles of a product that is recomputed for its gradient.

    Args:
        capability, is_half, is_aligned: Facts as for `plain_tiles`.
        is_plain: Whether there is no bias, no softcap and no gradient of the entropy.
    """
    if is_half and is_aligned and not is_plain:
        return HEAVY_SM90 if _has_big_memory(capability) else HEAVY_SM80
    if is_half and is_aligned and _has_big_memory(capability):
        return PLAIN_SM90
    return plain_tiles(capability, is_half=is_half, is_aligned=is_aligned)


def _has_big_memory(capability: tuple[int, int]) -> bool:
    """Return whether a core has 227 KiB of memory, as in data-centre GPUs from sm_90 on."""
    return (9, 0) <= capability < (12, 0)


def is_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, on host memory."""
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
        """Allocate memory for `num_splits` splits, to be written completely."""
        shape = (3 if needs_entropy else 2, num_splits, num_rows)
        return cls(torch.empty(shape, dtype=torch.float32, device=like.device), needs_entropy)

    def merge(self, target_logits: Tensor) -> RowStatistics:
        """Merge splits in order; return row statistics in natural units."""
        _, num_splits, num_rows = self.values.shape
        maximum, exp_sum, weighted_sum = self.values.new_zeros((3, num_rows)).unbind()
        triton_kernels.merge_partials[(triton.cdiv(num_rows, MERGE_BLOCK["BLOCK_ROWS"]),)](
            self.values,
            maximum,
            exp_sum,
            weighted_sum,
            num_rows,
            num_splits,
            NEEDS_ENTROPY=self.needs_entropy,
            **MERGE_BLOCK,
        )
        return RowStatistics(maximum, exp_sum, weighted_sum, target_logits)


def forward_partials(
    hidden: Tensor, layer: OutputLayer, tiles: TileConfig, *, needs_entropy: bool
) -> Partials:
    """Compute the statistics of each split of the vocabulary, with products kept on the chip."""
    num_rows, size = hidden.shape
    num_columns = len(layer.weight)
    num_splits = triton.cdiv(num_columns, tiles.block_columns * tiles.tiles_per_split)
    partials = Partials.allocate(num_splits, num_rows, hidden, needs_entropy=needs_entropy)
    num_tiles = triton.cdiv(num_rows, tiles.block_rows) * num_splits
    bias, scale, softcap, flags = transform_arguments(layer)
    triton_kernels.forward_partials[(num_tiles,)](
        hidden,
        layer.weight,
        bias,
        partials.values,
        num_rows,
        num_columns,
        size,
        num_splits,
        hidden.stride(0),
        layer.weight.stride(0),
        scale,
        softcap,
        NEEDS_ENTROPY=needs_entropy,
        TILES_PER_SPLIT=tiles.tiles_per_split,
        **_tile_constants(tiles),
        **flags,
    )
    return partials


def target_products(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute hidden[row] . weight[targets[row]] in float32, 0 if the target is outside: [rows]."""
    num_rows, size = hidden.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    block = _INTERPRETED_TARGET_BLOCK if is_interpreted() else TARGET_BLOCK
    triton_kernels.target_products[(triton.cdiv(num_rows, block["BLOCK_ROWS"]),)](
        hidden,
        weight,
        targets,
        out,
        num_rows,
        len(weight),
        size,
        hidden.stride(0),
        weight.stride(0),
        **block,
    )
    return out


def fold_grid(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Return the grid of programs that fold products [columns, rows]."""
    return triton.cdiv(num_rows, EPILOGUE_BLOCK["BLOCK_ROWS"]), triton.cdiv(
        num_columns, COLUMNS_PER_SPLIT
    )


def fold_products(
    products: Tensor,
    layer: OutputLayer,
    partials: Partials,
    *,
    first_row: int,
    first_split: int,
) -> None:
    """Write the statistics of products [columns, rows] to their place in `partials`."""
    num_columns, num_rows = products.shape
    _, total_splits, total_rows = partials.values.shape
    bias, scale, softcap, flags = transform_arguments(layer)
    triton_kernels.fold_products[fold_grid(num_rows, num_columns)](
        products,
        bias,
        partials.values,
        num_rows,
        num_columns,
        products.stride(0),
        scale,
        softcap,
        first_row,
        total_rows,
        first_split,
        total_splits,
        NEEDS_ENTROPY=partials.needs_entropy,
        **EPILOGUE_BLOCK,
        COLUMNS_PER_SPLIT=COLUMNS_PER_SPLIT,
        **flags,
    )


def grad_products(
    rows: GradRows, layer: OutputLayer, first_column: int, tiles: TileConfig
) -> Tensor:
    """Recompute rows.hidden @ weight.T; return its gradient [rows, columns] in hidden's dtype."""
    hidden, weight = rows.hidden, layer.weight
    num_rows, num_columns = len(hidden), len(weight)
    # Rows are padded to whole 16-byte vectors for the products that follow.
    padded = triton.cdiv(num_columns, 16) * 16
    out = torch.empty((num_rows, padded), dtype=hidden.dtype, device=hidden.device)
    out = out[:, :num_columns]
    if num_rows == 0:
        return out
    bias, scale, softcap, flags = transform_arguments(layer)
    num_tiles = triton.cdiv(num_rows, tiles.block_rows)
    num_tiles *= triton.cdiv(num_columns, tiles.block_columns)
    triton_kernels.grad_products[(num_tiles,)](
        hidden,
        weight,
        bias,
        *_row_arguments(rows),
        out,
        num_rows,
        num_columns,
        padded,
        hidden.shape[1],
        first_column,
        hidden.stride(0),
        weight.stride(0),
        out.stride(0),
        scale,
        softcap,
        **_tile_constants(tiles),
        **_gradient_flags(rows),
        **flags,
    )
    return out


def grad_of_stored_products(
    products: Tensor, rows: GradRows, layer: OutputLayer, first_column: int
) -> Tensor:
    """Return the gradient of products [columns, rows] in hidden's dtype; in place if possible."""
    num_columns, num_rows = products.shape
    out = products
    if products.dtype != rows.hidden.dtype:
        out = torch.empty_like(products, dtype=rows.hidden.dtype)
    if num_rows == 0:
        return out
    bias, scale, softcap, flags = transform_arguments(layer)
    grid = (
        triton.cdiv(num_rows, EPILOGUE_BLOCK["BLOCK_ROWS"]),
        triton.cdiv(num_columns, EPILOGUE_BLOCK["BLOCK_COLUMNS"]),
    )
    triton_kernels.grad_of_stored_products[grid](
        products,
        bias,
        *_row_arguments(rows),
        out,
        num_rows,
        num_columns,
        first_column,
        products.stride(0),
        scale,
        softcap,
        **_gradient_flags(rows),
        **EPILOGUE_BLOCK,
        **flags,
    )
    return out


def transform_arguments(layer: OutputLayer) -> tuple[Tensor, float, float, dict[str, bool]]:
    """Return (bias or any tensor, 1 / temperature, softcap or 1, compile-time flags)."""
    transform, bias = layer.transform, layer.bias
    flags = {"HAS_BIAS": bias is not None, "HAS_SOFTCAP": transform.softcap is not None}
    anything = layer.weight if bias is None else bias
    return anything, 1.0 / transform.temperature, transform.softcap or 1.0, flags


def _tile_constants(tiles: TileConfig) -> dict[str, int]:
    return {
        "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_COLUMNS": tiles.block_columns,
        "BLOCK_SIZE": tiles.block_size,
        "GROUP": tiles.group,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _row_arguments(rows: GradRows) -> tuple[Tensor, ...]:
    nothing = rows.maximum
    return (
        rows.targets,
        rows.maximum,
        rows.log_sum,
        rows.entropy,
        nothing if rows.grad_logprobs is None else rows.grad_logprobs,
        nothing if rows.grad_entropy is None else rows.grad_entropy,
    )


def _gradient_flags(rows: GradRows) -> dict[str, bool]:
    return {
        "HAS_GRAD_LOGPROB": rows.grad_logprobs is not None,
        "HAS_GRAD_ENTROPY": rows.grad_entropy is not None,
    }


@dataclass(frozen=True, slots=True)
class TritonEngine:
    """Engine of fused Triton kernels, without atomics and locks.

    Forward: tiles of products are reduced on the chip, split over the vocabulary, then merged.
    Backward: one kernel recomputes a chunk of products and stores their gradient in the dtype of
    the inputs; the library computes the two products that follow.

    Args:
        chunk_columns: Columns of one chunk in the backward pass.
        forward_tiles, gradient_tiles: Tile shapes.
    """

    chunk_columns: int
    forward_tiles: TileConfig
    gradient_tiles: TileConfig

    # Rows are loaded one by one, so any number is equally fast.
    row_multiple = 1

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """Return the dtype that both inputs have."""
        del weight
        return hidden.dtype

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Compute and merge statistics of tiles; compute the targets' logits separately."""
        if len(hidden) == 0 or len(layer.weight) == 0:
            return RowStatistics.empty(len(hidden), hidden, torch.float32)
        hidden = hidden.contiguous()
        partials = forward_partials(hidden, layer, self.forward_tiles, needs_entropy=needs_entropy)
        products = target_products(hidden, layer.weight, targets)
        return partials.merge(finish_target_logits(products, layer, targets))

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """Recompute the chunk's products and return their gradient."""
        return grad_products(rows, chunk, first_column, self.gradient_tiles)
