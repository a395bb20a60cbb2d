"""The differentiable operation that every implementation but `reference` shares.

An engine gives the row statistics of a weight and, chunk by chunk, the gradient of its logits.
Here are the rest: the merge over ranks, the rows that have a gradient, and the products for
dL/dhidden (summed over chunks in float32) and dL/dweight (each chunk of rows written once).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrft.kernels.logprob.products import add_product_, full_precision_reductions, write_product
from lightrft.kernels.logprob.rows import GradRows, RowStatistics
from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogitsTransform,
    LogprobOutput,
    OutputLayer,
    VocabShard,
    accumulation_dtype,
)
from lightrft.kernels.weight_bucket.broadcaster import all_gather_single


class LogprobEngine(Protocol):
    """One way to compute: products and their epilogues. Holds no tensors."""

    @property
    def chunk_columns(self) -> int:
        """Columns of the vocabulary for one call of `grad_logits`."""

    def product_dtype(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """The dtype in which operands enter the products."""

    def statistics(
        self, hidden: Tensor, layer: OutputLayer, targets: Tensor, *, needs_entropy: bool
    ) -> RowStatistics:
        """Row statistics over all columns of the layer; targets may lie outside it."""

    def grad_logits(self, rows: GradRows, chunk: OutputLayer, first_column: int) -> Tensor:
        """dL/d(hidden @ weight.T + bias) of the chunk: [rows, columns], any strides."""


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Everything that is not a tensor to differentiate.

    Args:
        engine: How to compute.
        transform: Softcap and temperature.
        entropy: Whether to compute the entropy, and whether gradients flow through it.
        shard: The part of the vocabulary that the weight is, or None if it is all of it.
        grad_weight: Takes dL/dweight in place of autograd, or None.
    """

    engine: LogprobEngine
    transform: LogitsTransform
    entropy: EntropyMode
    shard: VocabShard | None = None
    grad_weight: Tensor | None = None


def engine_logprob(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LogprobOptions
) -> LogprobOutput:
    """Logprobs and entropy by an engine; no row is ignored.

    Args:
        hidden: [tokens, hidden].
        weight: [columns, hidden].
        bias: [columns] or None.
        targets: [tokens] int64 rows of `weight`; outside it where another rank holds them.
        options: Engine, transform, entropy, shard.
    """
    logprobs, entropies = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, options
    )
    return LogprobOutput(logprobs, None if options.entropy == "none" else entropies)


class AutogradContext(Protocol):
    """The part of autograd's context that is used here."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps tensors for the backward pass."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Outputs without gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether a missing upstream gradient comes as zeros."""


class _Context(AutogradContext, Protocol):
    options: LogprobOptions


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: LogprobOptions,
    ) -> tuple[Tensor, Tensor | None]:
        layer = OutputLayer(weight, bias, options.transform)
        needs_entropy = options.entropy != "none"
        with full_precision_reductions():
            rows = options.engine.statistics(hidden, layer, targets, needs_entropy=needs_entropy)
        if options.shard is not None:
            rows = merge_over_ranks(rows, options.shard.group)
        entropy = rows.entropy
        ctx.options = options
        ctx.set_materialize_grads(False)
        biases = () if bias is None else (bias,)
        logprobs = rows.logprobs
        ctx.save_for_backward(
            hidden, weight, targets, rows.maximum, rows.log_sum, logprobs, entropy, *biases
        )
        if options.entropy == "none":
            return logprobs, None
        if options.entropy == "value":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        # The forward pass runs outside autocast; its recomputation must, too.
        device_type = ctx.saved_tensors[0].device.type
        with torch.autocast(device_type, enabled=False), full_precision_reductions():
            gradients = _backward(ctx, grad_logprobs, grad_entropy)
        return (*gradients, None, None)


def _backward(
    ctx: _Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    hidden, weight, targets, maximum, log_sum, logprobs, entropy, *biases = ctx.saved_tensors
    options = ctx.options
    index = _active_rows(targets, grad_logprobs, grad_entropy)
    rows = GradRows(
        hidden=hidden[index].to(options.engine.product_dtype(hidden, weight)),
        targets=targets[index],
        maximum=maximum[index],
        log_sum=log_sum[index],
        logprobs=logprobs[index],
        entropy=entropy[index],
        grad_logprobs=None if grad_logprobs is None else grad_logprobs[index],
        grad_entropy=None if grad_entropy is None else grad_entropy[index],
    )
    layer = OutputLayer(weight, biases[0] if biases else None, options.transform)
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
    grad_rows, grad_weight, grad_bias = _layer_gradients(rows, layer, options, needs)
    if grad_rows is None:
        return None, grad_weight, grad_bias
    if options.shard is not None:
        dist.all_reduce(grad_rows, group=options.shard.group)
    grad_hidden = torch.zeros_like(hidden)
    grad_hidden[index] = grad_rows.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def _layer_gradients(
    rows: GradRows, layer: OutputLayer, options: LogprobOptions, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of rows.hidden (in the accumulation dtype), weight and bias, where needed."""
    needs_hidden, needs_weight, needs_bias = needs
    weight, bias = layer.weight, layer.bias
    wide = accumulation_dtype(rows.hidden, weight, bias)
    grad_rows = torch.zeros_like(rows.hidden, dtype=wide) if needs_hidden else None
    target = options.grad_weight
    grad_weight = torch.empty_like(weight) if needs_weight and target is None else None
    grad_bias = torch.empty_like(bias) if needs_bias and bias is not None else None
    for start, stop, chunk in chunks(layer, options.engine.chunk_columns, rows.hidden.dtype):
        grad_logits = options.engine.grad_logits(rows, chunk, start)
        if grad_rows is not None:
            add_product_(grad_rows, grad_logits, chunk.weight)
        if grad_weight is not None:
            write_product(grad_weight[start:stop], grad_logits.T, rows.hidden)
        if needs_weight and target is not None:
            add_product_(target[start:stop], grad_logits.T, rows.hidden)
        if grad_bias is not None:
            grad_bias[start:stop] = grad_logits.sum(0, dtype=wide)
    return grad_rows, grad_weight, grad_bias


def chunks(
    layer: OutputLayer, chunk_columns: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, OutputLayer]]:
    """(first column, end, that part of the layer with its weight in `dtype`)."""
    for start in range(0, len(layer.weight), chunk_columns):
        stop = min(start + chunk_columns, len(layer.weight))
        bias = None if layer.bias is None else layer.bias[start:stop]
        yield start, stop, OutputLayer(layer.weight[start:stop].to(dtype), bias, layer.transform)


def _active_rows(
    targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Indices of the rows with a gradient; the others cost nothing in the backward pass."""
    is_active = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    for gradient in (grad_logprobs, grad_entropy):
        if gradient is not None:
            is_active |= gradient != 0
    return is_active.nonzero().squeeze(1)


def merge_over_ranks(rows: RowStatistics, group: dist.ProcessGroup | None) -> RowStatistics:
    """Statistics of the whole vocabulary from every rank's part, merged in the order of ranks.

    Args:
        rows: This rank's part; all four statistics travel in one all-gather.
        group: The ranks.
    """
    part = torch.stack((rows.maximum, rows.exp_sum, rows.weighted_sum, rows.target_logits))
    world_size = dist.get_world_size(group)
    parts = part.new_empty((world_size, *part.shape))
    all_gather_single(parts.view(-1), part.view(-1), group=group)
    merged = RowStatistics(*parts[0].unbind())
    for other in parts[1:]:
        merged = merged.merge(RowStatistics(*other.unbind()))
    return merged
