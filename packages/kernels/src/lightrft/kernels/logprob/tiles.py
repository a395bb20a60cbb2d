"""Tile shapes of the Triton kernels: a fixed table, so that no timing decides a result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one product kernel is cut.

    Args:
        block_rows, block_columns, block_size: Tile of rows, vocabulary and hidden size.
        num_warps, num_stages: Warps of a program and depth of its software pipeline.
        tiles_per_split: Vocabulary tiles that one program merges in registers.
        group: Row blocks that share a panel of the weight.
        uses_tma: Bulk copies through host-made descriptors; one persistent program per core.
        is_specialized: Besides, warps that only copy beside warps that only multiply.
    """

    block_rows: int
    block_columns: int
    block_size: int
    num_warps: int
    num_stages: int
    tiles_per_split: int = 4
    group: int = 8
    uses_tma: bool = False
    is_specialized: bool = False


FORWARD_SM80 = TileConfig(128, 128, 32, 8, 3)
FORWARD_SM90 = TileConfig(128, 128, 64, 8, 3)
FORWARD_TMA = TileConfig(128, 256, 64, 8, 4, tiles_per_split=1, group=16, uses_tma=True)
FORWARD_TMA_NARROW = TileConfig(128, 128, 64, 8, 4, tiles_per_split=1, group=16, uses_tma=True)
FORWARD_SPECIALIZED = TileConfig(
    128, 256, 64, 4, 4, tiles_per_split=1, group=16, uses_tma=True, is_specialized=True
)
GRADIENT_SM80 = TileConfig(128, 128, 32, 8, 3)
GRADIENT_SM90 = TileConfig(128, 128, 64, 8, 3)
# Float32 operands take twice the memory on the chip.
FLOAT32 = TileConfig(64, 64, 32, 8, 2)


def forward_tiles(capability: tuple[int, int], *, is_half: bool) -> TileConfig:
    """Tiles of the forward product with plain loads on a GPU of this compute capability."""
    if not is_half:
        return FLOAT32
    return FORWARD_SM90 if capability >= (9, 0) else FORWARD_SM80


def bulk_tiles(
    capability: tuple[int, int], triton_version: tuple[int, int], *, is_plain: bool
) -> tuple[TileConfig, ...]:
    """Tiles of the forward product with bulk copies, the preferred ones first.

    Specialised warps compile for sm_90 with Triton 3.6; 3.7 cannot split a host-made descriptor.

    Args:
        capability: Compute capability of the GPU.
        triton_version: Major and minor version.
        is_plain: Neither entropy nor softcap, whose registers the widest tile has no room for.
    """
    if capability < (9, 0):
        return ()
    wide = FORWARD_TMA if is_plain and capability < (10, 0) else FORWARD_TMA_NARROW
    is_specialized = triton_version == (3, 6) and capability < (10, 0) and is_plain
    return (FORWARD_SPECIALIZED, wide) if is_specialized else (wide,)


def gradient_tiles(capability: tuple[int, int], *, is_half: bool) -> TileConfig:
    """Tiles of the recomputed product in the backward pass."""
    if not is_half:
        return FLOAT32
    return GRADIENT_SM90 if capability >= (9, 0) else GRADIENT_SM80
