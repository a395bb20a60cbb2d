"""Logprobs in plain torch, in blocks of logits that fit a CPU's caches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.kernels.logprob.passes import chunks
from lightrft.kernels.logprob.products import product_into
from lightrft.kernels.logprob.rows import GradRows, RowStatistics, RunningRows, grad_of_logits
from lightrft.kernels.logprob.types import OutputLayer, accumulation_dtype

# With fewer rows, a product is slower. More logits exceed the second-level cache. With fewer
# columns, operations on one number per row dominate.
BLOCK_TOKENS = 512
BLOCK_LOGITS = 2**19
MAX_BLOCK_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class ChunkedEngine:
    """Engine with products in float32 (float64 if an input is), `chunk_columns` at a time.

    Args:
        chunk_columns: Columns of the vocabulary whose gradients are stored at a time.
    """

    chunk_columns: int

    # Any number of rows is equally fast.
    row_multiple = 1

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """Return the wide dtype, to which both operands are converted."""
        return accumulation_dtype(hidden, weight)

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Compute statistics by blocks of the vocabulary; token blocks share widened weights."""
        dtype = accumulation_dtype(hidden, layer.weight, layer.bias)
        wide = hidden.to(dtype)
        blocks = token_blocks(len(hidden))
        rows = [RunningRows.empty(targets[block], dtype) for block in blocks]
        columns = min(self.chunk_columns, block_columns(len(hidden)))
        num_logits = min(len(hidden), BLOCK_TOKENS) * columns
        buffers = wide.new_empty(2 if needs_entropy else 1, num_logits)
        for start, _, chunk in chunks(layer, columns, dtype):
            for block, running in zip(blocks, rows, strict=True):
                shape = (len(running.targets), len(chunk.weight))
                views = [b[: shape[0] * shape[1]].view(shape) for b in buffers]
                logits_into(views[0], wide[block], chunk)
                running.add(views[0], start, scratch=views[1] if needs_entropy else None)
        return RowStatistics.joined(running.statistics() for running in rows)

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """Recompute the chunk's logits block by block; return their gradient."""
        grad = rows.hidden.new_empty(len(rows.hidden), len(chunk.weight))
        columns = block_columns(len(rows.hidden))
        for token_block in token_blocks(len(rows.hidden)):
            part = rows.block(token_block)
            for start, stop, block in chunks(chunk, columns, grad.dtype):
                logits = grad[token_block, start:stop]
                logits_into(logits, part.hidden, block)
                computed = grad_of_logits(logits, part, first_column + start, chunk.transform)
                if computed.data_ptr() != logits.data_ptr():
                    logits.copy_(computed)
        return grad


def token_blocks(num_tokens: int) -> list[slice]:
    """Return blocks of about equal size; one empty block without tokens."""
    num_blocks = max(1, -(-num_tokens // BLOCK_TOKENS))
    borders = [num_tokens * index // num_blocks for index in range(num_blocks + 1)]
    return [slice(*borders[index : index + 2]) for index in range(num_blocks)]


def block_columns(num_tokens: int) -> int:
    """Return the number of columns in a block of logits of `num_tokens` tokens."""
    return min(MAX_BLOCK_COLUMNS, BLOCK_LOGITS // max(1, min(num_tokens, BLOCK_TOKENS)))


def logits_into(out: Tensor, hidden: Tensor, chunk: OutputLayer) -> None:
    """Set `out` [tokens, columns] to the logits of a part of the layer with a wide weight."""
    product_into(out, hidden, chunk.weight.T)
    transform = chunk.transform
    if chunk.bias is not None:
        out.add_(chunk.bias.to(out.dtype))
    if transform.softcap is not None:
        out.div_(transform.softcap).tanh_().mul_(transform.softcap)
        if chunk.bias is not None:
            out.masked_fill_(chunk.bias == -torch.inf, -torch.inf)
    if transform.temperature != 1:
        out.div_(transform.temperature)
