"""Passes shared by all implementations except `reference`, without autograd.

An engine returns the row statistics of a weight and, chunk by chunk, the gradient of its logits.
This module does the rest: it selects rows, and computes the products for dL/dhidden (summed over
chunks in float32) and dL/dweight (each chunk of rows written once). Matrix products accumulate in
float32 for any dtype of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightrft.kernels.logprob.rows import GradRows, RowStatistics, select_rows
from lightrft.kernels.logprob.types import OutputLayer, accumulation_dtype, validate_bounds


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32 (float64 for float64 inputs), never rounded to less.

    This holds for any setting of `torch.set_float32_matmul_precision`, which is not changed.
    """
    if _runs_on_tensor_cores(left, right):
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.is_cuda and {left.dtype, right.dtype} == {torch.bfloat16, torch.float32}:
        return split_product(left, right)
    is_double = torch.float64 in (left.dtype, right.dtype)
    dtype = torch.float64 if is_double else torch.float32
    left, right = left.to(dtype), right.to(dtype)
    if dtype == torch.float64 or not may_round_operands(left.device):
        return left @ right
    if left.is_cuda:
        return product_of_parts(left, right)
    return (left.double() @ right.double()).to(dtype)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set `out` to left @ right, all of one wide dtype, without allocations if torch is exact."""
    if _may_round(left):
        out.copy_(wide_product(left, right))
    else:
        torch.mm(left, right, out=out)


def accumulate_into(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, all of one wide dtype; see `product_into`."""
    if _may_round(left):
        total += wide_product(left, right)
    else:
        torch.addmm(total, left, right, out=total)


def _may_round(operand: Tensor) -> bool:
    return operand.dtype == torch.float32 and may_round_operands(operand.device)


def split_product(left: Tensor, right: Tensor, *, num_parts: int = 3) -> Tensor:
    """Multiply a bfloat16 and a float32 matrix in float32, the latter as a sum of bfloat16 parts.

    Each part rounds the remainder of the previous parts; three hold all 24 digits of a float32
    number. Each part costs one bfloat16 product. On GPUs with tensor cores, float32 products are
    about 15 times slower.
    """
    is_left = left.dtype == torch.float32
    total, rest = None, left if is_left else right
    for _ in range(num_parts):
        part = rest.to(torch.bfloat16)
        rest = rest - part.float()
        product = wide_product(part, right) if is_left else wide_product(left, part)
        total = product if total is None else total.add_(product)
    if total is None:
        raise ValueError(f"num_parts must be at least 1: got {num_parts}")
    return total


def may_round_operands(device: torch.device) -> bool:
    """Return whether the device may round float32 operands of a product to fewer digits."""
    return _operand_precision(device) not in ("ieee", "none")


def _operand_precision(device: torch.device) -> str:
    settings = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return str(settings.matmul.fp32_precision)


def product_of_parts(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right in float32 from three products with heads that TF32 does not round.

    x = head + rest with 11 digits in the head and at most 13 in the rest. The digits that TF32
    drops of the rest, and the product of the rests, are below 2^-21 of the result's terms.
    """
    left_head, right_head = _head(left), _head(right)
    small = (left - left_head) @ right_head + left_head @ (right - right_head)
    return left_head @ right_head + small


def _head(x: Tensor) -> Tensor:
    """Return float32 numbers with the lowest 13 of their 24 digits set to zero."""
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which is float32 (float64 for float64 inputs)."""
    if _runs_on_tensor_cores(left, right) and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        # Summed separately and then added: a library may add term by term to the total.
        total += wide_product(left, right)


def write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set `out` to left @ right, summed in float32 and rounded once to its dtype."""
    # cuBLAS may sum the parts of a split product in bfloat16 if the setting allows it. The setting
    # is global, so it cannot change for one operation: other threads compute at the same time.
    may_round = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    if _runs_on_tensor_cores(left, right) and not may_round and out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(wide_product(left, right))


def _runs_on_tensor_cores(left: Tensor, right: Tensor) -> bool:
    return left.is_cuda and left.dtype == right.dtype == torch.bfloat16


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
