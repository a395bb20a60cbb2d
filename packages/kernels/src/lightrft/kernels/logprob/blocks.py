"""Logits in plain torch, in blocks that fit a CPU's caches: logprobs, and a loss in the layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightrft.kernels.logprob.passes import accumulate_into, chunks, product_into
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


class LayerGradients(NamedTuple):
    """Sums over tokens, wide; None if a gradient is not needed.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        bias: [vocab].
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Block:
    """Logits [tokens, columns] of some columns; without values they are recomputed."""

    start: int
    stop: int
    values: Tensor | None
    epoch: int


@dataclass(slots=True)
class StoredLogits:
    """Logits of some tokens over the whole vocabulary, kept until their gradient.

    A block keeps exp(z - r) with one reference r for each row. Let w = exp(r - log Z), where Z is
    the row's sum over the vocabulary. The gradient of the logits of a row with the upstream
    gradient g is

        dL/dz = g (onehot - w exp(z - r))

    Products with the kept numbers need no pass over them: w and g scale the hidden states, or the
    rows of the result. The target's entry g (1 - p) is added separately, from expm1, to keep its
    digits if p is near 1. Gradients through the entropy and a softcap need z, which is then kept
    instead.

    Args:
        hidden: [tokens, hidden], wide.
        layer: Output layer.
        targets: [tokens] int64.
        keeps_logits: Whether blocks keep z instead of exp(z - r).
        statistics: Statistics of the rows.
        blocks: Kept blocks, by columns.
        references: r of each epoch, shared by the blocks of that epoch.
    """

    hidden: Tensor
    layer: OutputLayer
    targets: Tensor
    keeps_logits: bool
    statistics: RowStatistics
    blocks: list[Block] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)

    @classmethod
    def compute(
        cls,
        hidden: Tensor,
        layer: OutputLayer,
        targets: Tensor,
        store: Tensor,
        *,
        needs_entropy: bool,
        keeps_logits: bool,
    ) -> StoredLogits:
        """Compute the logits and keep as many as fit the store.

        Args:
            hidden: [tokens, hidden], wide.
            layer: Output layer.
            targets: [tokens] int64.
            store: [numbers], wide; overwritten.
            needs_entropy: Whether statistics include the entropy.
            keeps_logits: Whether to keep z instead of exp(z - r).
        """
        num_tokens = len(hidden)
        running = RunningRows.empty(targets, hidden.dtype)
        stored = cls(hidden, layer, targets, keeps_logits, running.statistics())
        columns = block_columns(num_tokens)
        has_scratch = needs_entropy or keeps_logits
        scratch = hidden.new_empty(3 if has_scratch else 1, num_tokens * columns)
        used = 0
        for start, stop, chunk in chunks(layer, columns, hidden.dtype):
            size = num_tokens * (stop - start)
            shape = (num_tokens, stop - start)
            is_kept = used + size <= len(store)
            values = (store[used : used + size] if is_kept else scratch[0, :size]).view(shape)
            logits_into(values, hidden, chunk)
            summed = values
            if keeps_logits:
                summed = scratch[1, :size].view(shape).copy_(values)
            spare = scratch[2, :size].view(shape) if needs_entropy else None
            if running.add(summed, start, scratch=spare):
                stored.references.append(running.reference)
            epoch = len(stored.references) - 1
            stored.blocks.append(Block(start, stop, values if is_kept else None, epoch))
            used += size if is_kept else 0
        stored.statistics = running.statistics()
        return stored

    def add_gradients(self, totals: LayerGradients, rows: GradRows, places: Tensor) -> None:
        """Add the gradients of these tokens, overwriting kept blocks.

        Args:
            totals: Sums of gradients; that of hidden is assigned.
            rows: These tokens with their upstream gradients.
            places: Rows of `totals.hidden`, [tokens] int64.
        """
        grad_hidden = None if totals.hidden is None else torch.zeros_like(self.hidden)
        if self.keeps_logits:
            self._add_of_logits(totals, rows, grad_hidden)
        else:
            self._add_of_exponentials(totals, rows, grad_hidden)
        if totals.hidden is not None and grad_hidden is not None:
            totals.hidden[places] = grad_hidden

    def _add_of_logits(
        self, totals: LayerGradients, rows: GradRows, grad_hidden: Tensor | None
    ) -> None:
        for block, chunk in self._with_weights():
            logits = self._logits(chunk) if block.values is None else block.values
            grad = grad_of_logits(logits, rows, block.start, chunk.transform)
            columns = slice(block.start, block.stop)
            if grad_hidden is not None:
                accumulate_into(grad_hidden, grad, chunk.weight)
            if totals.weight is not None:
                accumulate_into(totals.weight[columns], grad.T, self.hidden)
            if totals.bias is not None:
                totals.bias[columns] += grad.sum(0)

    def _add_of_exponentials(
        self, totals: LayerGradients, rows: GradRows, grad_hidden: Tensor | None
    ) -> None:
        upstream = rows.grad_logprobs
        if upstream is None:
            return
        upstream = upstream / self.layer.transform.temperature
        log_sum = rows.maximum + rows.log_sum
        epoch, factor, scaled, partial = -1, upstream, self.hidden, grad_hidden
        for block, chunk in self._with_weights():
            if block.epoch != epoch:
                _add_scaled(grad_hidden, partial if epoch >= 0 else None, factor)
                epoch = block.epoch
                factor = -upstream * (self.references[epoch] - log_sum).exp()
                scaled = self.hidden * factor[:, None]
                partial = None if grad_hidden is None else torch.zeros_like(grad_hidden)
            values = self._exponentials(block, chunk)
            self.clear_targets(values, block)
            columns = slice(block.start, block.stop)
            if partial is not None:
                accumulate_into(partial, values, chunk.weight)
            if totals.weight is not None:
                accumulate_into(totals.weight[columns], values.T, scaled)
            if totals.bias is not None:
                totals.bias[columns] += factor @ values
        _add_scaled(grad_hidden, partial if epoch >= 0 else None, factor)
        # 1 - p without cancellation.
        target_entry = -upstream * rows.logprobs.expm1()
        if grad_hidden is not None:
            wanted = self.layer.weight[self.targets].to(grad_hidden.dtype)
            grad_hidden += wanted * target_entry[:, None]
        if totals.weight is not None:
            totals.weight.index_add_(0, self.targets, self.hidden * target_entry[:, None])
        if totals.bias is not None:
            totals.bias.index_add_(0, self.targets, target_entry)

    def _with_weights(self) -> Iterator[tuple[Block, OutputLayer]]:
        parts = chunks(self.layer, block_columns(len(self.hidden)), self.hidden.dtype)
        for block, (_, _, chunk) in zip(self.blocks, parts, strict=True):
            yield block, chunk

    def _exponentials(self, block: Block, chunk: OutputLayer) -> Tensor:
        if block.values is not None:
            return block.values
        return self._logits(chunk).sub_(self.references[block.epoch][:, None]).exp_()

    def _logits(self, chunk: OutputLayer) -> Tensor:
        logits = self.hidden.new_empty(len(self.hidden), len(chunk.weight))
        logits_into(logits, self.hidden, chunk)
        return logits

    def clear_targets(self, values: Tensor, block: Block) -> None:
        """Set the entries of the targets within a block to zero."""
        is_inside = (self.targets >= block.start) & (self.targets < block.stop)
        inside = is_inside.nonzero().squeeze(1)
        values[inside, self.targets[inside] - block.start] = 0


def _add_scaled(total: Tensor | None, part: Tensor | None, factor: Tensor) -> None:
    if total is not None and part is not None:
        total += part.mul_(factor[:, None])
