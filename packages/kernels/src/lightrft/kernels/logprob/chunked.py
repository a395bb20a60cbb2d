"""Logprobs by chunks of the vocabulary in plain torch: all logits never exist at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.kernels.logprob.autograd import chunks
from lightrft.kernels.logprob.products import wide_product
from lightrft.kernels.logprob.rows import (
    GradRows,
    RowStatistics,
    finish_logits,
    grad_of_logits,
)
from lightrft.kernels.logprob.types import accumulation_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lightrft.kernels.logprob.types import OutputLayer


@dataclass(frozen=True, slots=True)
class ChunkedEngine:
    """Products in float32 (float64 if an input is), `chunk_columns` columns at a time."""

    chunk_columns: int

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """Both operands are widened."""
        return accumulation_dtype(hidden, weight)

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """One chunk after another."""
        dtype = accumulation_dtype(hidden, layer.weight, layer.bias)
        wide = hidden.to(dtype)
        rows = RowStatistics.empty(len(hidden), hidden, dtype)
        for start, _, chunk in chunks(layer, self.chunk_columns, dtype):
            logits = self._logits(wide, chunk)
            rows = rows.merge(
                RowStatistics.of_logits(
                    logits, targets, start, needs_entropy=needs_entropy, may_overwrite=True
                )
            )
        return rows

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """Recomputes the chunk's logits."""
        return grad_of_logits(self._logits(rows.hidden, chunk), rows, first_column, chunk.transform)

    def _logits(self, hidden: Tensor, chunk: OutputLayer) -> Tensor:
        product = wide_product(hidden, chunk.weight.T)
        return finish_logits(product, chunk.bias, None, chunk.transform)
