"""Logprobs by fused Triton kernels: the logits of the forward pass never leave the chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightrft.kernels.logprob import triton_launch
from lightrft.kernels.logprob.rows import RowStatistics, finish_target_logits

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.kernels.logprob.rows import GradRows
    from lightrft.kernels.logprob.tiles import TileConfig
    from lightrft.kernels.logprob.types import OutputLayer


@dataclass(frozen=True, slots=True)
class TritonEngine:
    """Forward: tiles of products reduced on the chip, split over the vocabulary, then merged.

    Backward: one kernel recomputes a chunk of products and stores their gradient in the dtype of
    the inputs; the two products that follow are the library's. No atomics, no locks.

    Args:
        chunk_columns: Columns of one chunk in the backward pass.
        forward_tiles, gradient_tiles: Tile shapes.
    """

    chunk_columns: int
    forward_tiles: TileConfig
    gradient_tiles: TileConfig

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """That of the inputs; both have the same."""
        del weight
        return hidden.dtype

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Partial statistics by tiles, merged; the target's logit by a dot product of its own."""
        if len(hidden) == 0 or len(layer.weight) == 0:
            return RowStatistics.empty(len(hidden), hidden, torch.float32)
        hidden = hidden.contiguous()
        partials = triton_launch.forward_partials(
            hidden, layer, self.forward_tiles, needs_entropy=needs_entropy
        )
        products = triton_launch.target_products(hidden, layer.weight, targets)
        return partials.merge(finish_target_logits(products, layer, targets))

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """Recomputes the chunk's products and stores their gradient."""
        return triton_launch.grad_products(rows, chunk, first_column, self.gradient_tiles)
