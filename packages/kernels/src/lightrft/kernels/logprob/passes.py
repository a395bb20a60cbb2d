"""Passes shared by all implementations except `reference`, without autograd.

An engine returns the row statistics of a weight and, chunk by chunk, the gradient of its logits.
This module does the rest: it selects rows, and computes the products for dL/dhidden (summed over
chunks in float32) and dL/dweight (each chunk of rows written once).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightrft.kernels.logprob.products import add_product_, write_product
from lightrft.kernels.logprob.rows import GradRows, RowStatistics, select_rows
from lightrft.kernels.logprob.types import OutputLayer, accumulation_dtype, validate_bounds

# As the largest logit of a row, it makes all probabilities 0, and its cube is finite.
_NO_PROBABILITY = 1e12


class LogprobEngine(Protocol):
    """Implementation of products and their epilogues, which holds no tensors."""

    @property
    def chunk_columns(self) -> int:
        """Columns of the vocabulary for one call of `grad_logits`."""

    @property
    def row_multiple(self) -> int:
        """Divisor of the padded number of rows."""

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """Return the dtype of operands in products."""

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Return row statistics over all columns of the layer; targets may lie outside it."""

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """Return dL/d(hidden @ weight.T + bias) of the chunk: [rows, columns], any strides."""


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Options of a pass that are not tensors.

    Args:
        engine: Implementation.
        needs_entropy: Whether the entropy is computed.
        ignore_index: Target of rows that do not count.
    """

    engine: LogprobEngine
    needs_entropy: bool
    ignore_index: int


class RowResults(NamedTuple):
    """Outputs, and numbers of each row that the backward pass needs: [tokens] each.

    Args:
        logprobs: Logprobs of the targets; 0 in rows that do not count.
        entropies: Entropies, likewise; empty if no entropy is requested.
        maximum, log_sum: Largest logit, and log of the sum of exponentials relative to it.
    """

    logprobs: Tensor
    entropies: Tensor
    maximum: Tensor
    log_sum: Tensor


@dataclass(frozen=True, slots=True)
class Upstream:
    """Upstream gradients, [tokens] each, or None."""

    logprobs: Tensor | None
    entropies: Tensor | None

    def reach(self, targets: Tensor) -> Tensor:
        """Return which rows have a gradient: [tokens] bool."""
        reached = torch.zeros_like(targets, dtype=torch.bool)
        for gradient in (self.logprobs, self.entropies):
            if gradient is not None:
                reached |= gradient != 0
        return reached


def statistics_of_rows(
    hidden: Tensor, layer: OutputLayer, targets: Tensor, options: PassOptions
) -> RowResults:
    """Run the forward pass.

    Args:
        hidden: [tokens, hidden].
        layer: Output layer.
        targets: [tokens] int64 in the vocabulary, or `options.ignore_index`.
        options: Options of the pass.
    """
    vocab_size = len(layer.weight)
    chosen = select_rows(
        targets != options.ignore_index, targets, vocab_size, multiple=options.engine.row_multiple
    )
    validate_bounds(chosen.smallest, chosen.largest, vocab_size, options.ignore_index)
    # An ignored row that is computed with the others must have its target in no column.
    columns = torch.where(chosen.mask, targets, -1)
    rows = options.engine.statistics(
        chosen.take(hidden), layer, chosen.take(columns, -1), needs_entropy=options.needs_entropy
    )
    wide = accumulation_dtype(hidden, layer.weight, layer.bias)

    def place(values: Tensor, fill: float) -> Tensor:
        return chosen.place(values.to(wide), fill)

    return RowResults(
        logprobs=place(rows.logprobs, 0),
        entropies=place(rows.entropy, 0) if options.needs_entropy else hidden.new_empty(0).to(wide),
        maximum=place(rows.maximum, _NO_PROBABILITY),
        log_sum=place(rows.log_sum, 0),
    )


def gradients_of_layer(
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    results: RowResults,
    upstream: Upstream,
    sink: GradientSink,
    options: PassOptions,
) -> Tensor | None:
    """Run the backward pass, writing gradients of weight and bias to the sink.

    Args:
        hidden, layer, targets, options: Arguments of the forward pass.
        results: Results of the forward pass.
        upstream: Gradients of its outputs.
        sink: Needed gradients and their destinations.

    Returns:
        dL/dhidden in the dtype of hidden, or None if it is not needed.
    """
    mask = upstream.reach(targets) & (targets != options.ignore_index)
    chosen = select_rows(mask, multiple=options.engine.row_multiple)

    def reached(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else chosen.take(torch.where(mask, gradient, 0))

    dtype = options.engine.product_dtype(hidden, layer.weight)
    rows = GradRows(
        hidden=chosen.take(hidden).to(dtype),
        targets=chosen.take(targets, -1),
        # A row that is kept without a gradient must not overflow before it becomes 0.
        maximum=chosen.take(torch.where(mask, results.maximum, _NO_PROBABILITY), _NO_PROBABILITY),
        log_sum=chosen.take(results.log_sum),
        logprobs=chosen.take(results.logprobs),
        entropy=chosen.take(results.entropies if options.needs_entropy else results.logprobs),
        grad_logprobs=reached(upstream.logprobs),
        grad_entropy=reached(upstream.entropies),
    )
    grad_rows = _layer_gradients(rows, layer, sink, options)
    return None if grad_rows is None else chosen.spread(grad_rows.to(hidden.dtype))


@dataclass(frozen=True, slots=True)
class GradientSink:
    """Destinations of gradients; None where they are not needed.

    Args:
        needs_hidden: Whether dL/dhidden is computed.
        weight: Output [columns, hidden].
        bias: Output [columns].
    """

    needs_hidden: bool
    weight: Tensor | None
    bias: Tensor | None


def _layer_gradients(
    rows: GradRows, layer: OutputLayer, sink: GradientSink, options: PassOptions
) -> Tensor | None:
    """Return the gradient of rows.hidden in the accumulation dtype, if needed; fill the sink."""
    wide = accumulation_dtype(rows.hidden, layer.weight, layer.bias)
    grad_rows = torch.zeros_like(rows.hidden, dtype=wide) if sink.needs_hidden else None
    for start, stop, chunk in chunks(layer, options.engine.chunk_columns, rows.hidden.dtype):
        grad_logits = options.engine.grad_logits(rows, chunk, start)
        if grad_rows is not None:
            add_product_(grad_rows, grad_logits, chunk.weight)
        if sink.weight is not None:
            write_product(sink.weight[start:stop], grad_logits.T, rows.hidden)
        if sink.bias is not None:
            sink.bias[start:stop] = grad_logits.sum(0, dtype=wide)
    return grad_rows


def chunks(
    layer: OutputLayer, chunk_columns: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, OutputLayer]]:
    """Yield (first column, end, this part of the layer with its weight in `dtype`)."""
    for start in range(0, len(layer.weight), chunk_columns):
        stop = min(start + chunk_columns, len(layer.weight))
        bias = None if layer.bias is None else layer.bias[start:stop]
        yield start, stop, OutputLayer(layer.weight[start:stop].to(dtype), bias, layer.transform)
