"""Loss inside the output layer on a CPU: logits of some tokens, kept until their gradient.

A block keeps exp(z - r) with one reference r for each row. Let w = exp(r - log Z), where Z is the
row's sum over the vocabulary. The gradient of the logits of a row with the upstream gradient g is

    dL/dz = g (onehot - w exp(z - r))

Products with the kept numbers need no pass over them: w and g scale the hidden states, or the rows
of the result. The target's entry g (1 - p) is added separately, from expm1, to keep its digits if
p is near 1. Gradients through the entropy and a softcap need z, which is then kept instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightrft.kernels.logprob.chunked_engine import block_columns, logits_into
from lightrft.kernels.logprob.passes import chunks
from lightrft.kernels.logprob.products import accumulate_into
from lightrft.kernels.logprob.rows import GradRows, RowStatistics, RunningRows, grad_of_logits
from lightrft.kernels.logprob.types import OutputLayer


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

    @property
    def are_needed(self) -> bool:
        """Return whether any gradient is needed."""
        return any(gradient is not None for gradient in self)


@dataclass(frozen=True, slots=True)
class Block:
    """Logits [tokens, columns] of some columns; without values they are recomputed."""

    start: int
    stop: int
    values: Tensor | None
    epoch: int


@dataclass(slots=True)
class StoredLogits:
    """Logits of some tokens over the whole vocabulary.

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
