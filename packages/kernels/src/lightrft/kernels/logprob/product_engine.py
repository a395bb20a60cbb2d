"""Logprobs from stored library matrix products, one chunk of the vocabulary at a time.

Products are float32, stored [columns, tokens] for each chunk; Triton kernels read them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.kernels.logprob.passes import chunks, split_product, wide_product
from lightrft.kernels.logprob.rows import GradRows, RowStatistics, finish_target_logits
from lightrft.kernels.logprob.types import OutputLayer, accumulation_dtype

# Bytes of products stored at a time in the forward pass; they stay in the cache until reduced.
_BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class ProductEngine:
    """Engine with products of whole chunks, and one pass over them.

    Args:
        chunk_columns: Columns of the vocabulary in one chunk.
        splits_weight: Whether a float32 weight meets bfloat16 hidden states. Products of bfloat16
            parts then give the logits of float32, with gradients stored in bfloat16.
    """

    chunk_columns: int
    splits_weight: bool = False

    # Rows of products are contiguous, in whole 16-byte vectors.
    row_multiple = 16

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """Return bfloat16 if both inputs have it on CUDA, else the accumulation dtype."""
        if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
            return hidden.dtype
        return accumulation_dtype(hidden, weight)

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Compute products by blocks; write their statistics to one table and merge it."""
        from lightrft.kernels.logprob import triton_launch

        hidden = hidden.to(self.product_dtype(hidden, layer.weight))
        if len(hidden) == 0 or len(layer.weight) == 0:
            return RowStatistics.empty(
                len(hidden), hidden, accumulation_dtype(hidden, layer.weight)
            )
        per_chunk = -(-self.chunk_columns // triton_launch.COLUMNS_PER_SPLIT)
        num_chunks, rest = divmod(len(layer.weight), self.chunk_columns)
        num_splits = num_chunks * per_chunk + -(-rest // triton_launch.COLUMNS_PER_SPLIT)
        partials = triton_launch.Partials.allocate(
            num_splits, len(hidden), hidden, needs_entropy=needs_entropy
        )
        columns = min(self.chunk_columns, len(layer.weight))
        step = max(128, _BLOCK_BYTES // (columns * 4) // 128 * 128)
        for start, _, chunk in chunks(layer, self.chunk_columns, hidden.dtype):
            for first in range(0, len(hidden), step):
                products = self.products(hidden[first : first + step], chunk)
                triton_launch.fold_products(
                    products,
                    chunk,
                    partials,
                    first_row=first,
                    first_split=start // self.chunk_columns * per_chunk,
                )
        wanted = target_products(hidden, layer.weight.detach(), targets)
        return partials.merge(finish_target_logits(wanted, layer, targets))

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """Recompute the chunk's products; return the gradient of its logits."""
        products = self.products(rows.hidden, chunk)
        return self.grad_of_products(products, rows, chunk, first_column)

    def products(self, hidden: Tensor, chunk: OutputLayer) -> Tensor:
        """Return the products weight @ hidden.T: [columns, tokens]."""
        if self.splits_weight:
            # The widened hidden states convert back without loss.
            return split_product(chunk.weight, hidden.T.to(torch.bfloat16))
        return wide_product(chunk.weight, hidden.T)

    def fold(
        self, products: Tensor, chunk: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Return the statistics of stored products, without the targets' logits."""
        from lightrft.kernels.logprob import triton_launch

        num_splits = -(-len(products) // triton_launch.COLUMNS_PER_SPLIT)
        partials = triton_launch.Partials.allocate(
            num_splits, products.shape[1], products, needs_entropy=needs_entropy
        )
        triton_launch.fold_products(products, chunk, partials, first_row=0, first_split=0)
        return partials.merge(torch.zeros_like(targets, dtype=torch.float32))

    def grad_of_products(
        self, products: Tensor, rows: GradRows, chunk: OutputLayer, first_column: int
    ) -> Tensor:
        """Return the gradient of stored products, [rows, columns]; may overwrite the products."""
        from lightrft.kernels.logprob import triton_launch

        dtype = torch.bfloat16 if self.splits_weight else rows.hidden.dtype
        grad = triton_launch.grad_of_stored_products(products, rows, chunk, first_column)
        return grad.to(dtype).T


def target_products(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute hidden[row] . weight[targets[row]] in float32; 0 if the target is outside.

    Args:
        hidden: [tokens, hidden].
        weight: [columns, hidden].
        targets: [tokens] int64.

    Returns:
        [tokens] in the accumulation dtype.
    """
    dtype = accumulation_dtype(hidden, weight)
    out = torch.zeros(len(hidden), dtype=dtype, device=hidden.device)
    if len(weight) == 0:
        return out
    step = 1024  # bounds the widened copies
    for first in range(0, len(hidden), step):
        block = slice(first, first + step)
        rows = weight[targets[block].clamp(0, len(weight) - 1)].to(dtype)
        out[block] = (hidden[block].to(dtype) * rows).sum(1)
    return torch.where((targets >= 0) & (targets < len(weight)), out, 0)
