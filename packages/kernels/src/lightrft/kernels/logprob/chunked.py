"""Logprobs by chunks of the vocabulary: all logits never exist at once, forward or backward.

With z = softcap(hidden @ weight.T + bias) / T, p = exp(z - lse), M = max z, S = sum exp(z - M) and
U = sum exp(z - M) (z - M):

    logprob = (z_target - M) - log S        entropy = log S - U / S
    dL/dz = gl (onehot - p) - ge p (log p + entropy)

for upstream gradients gl (logprobs) and ge (entropy). The backward pass recomputes each chunk of
logits from the saved M and log S; a chunk's rows of dL/dweight are complete after one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.autograd.function import once_differentiable

from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogitsLaw,
    LogprobOutput,
    accumulation_dtype,
    compute_logits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def chunked_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    law: LogitsLaw,
    entropy: EntropyMode,
    chunk_columns: int,
) -> LogprobOutput:
    """Logprobs and entropy with work space for `chunk_columns` columns; no row is ignored.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        bias: [vocab] or None.
        targets: [tokens] int64, in range.
        law: Softcap and temperature.
        entropy: Whether to compute the entropy, and whether gradients flow through it.
        chunk_columns: Columns of the vocabulary computed at a time.
    """
    options = _Options(law, entropy, chunk_columns)
    logprobs, entropies = _ChunkedLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, options
    )
    return LogprobOutput(logprobs, None if entropy == "none" else entropies)


@dataclass(frozen=True, slots=True)
class _Options:
    law: LogitsLaw
    entropy: EntropyMode
    chunk_columns: int


class _Context(Protocol):
    """The part of autograd's context that is used here."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    has_bias: bool
    options: _Options

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


@dataclass(slots=True)
class _RowStatistics:
    """Running reductions over the chunks seen so far, one value per row: [tokens]."""

    maximum: Tensor
    exp_sum: Tensor
    weighted_sum: Tensor
    target_logits: Tensor

    def add(self, logits: Tensor, targets: Tensor, first_column: int) -> None:
        """Folds in a chunk of logits [tokens, columns]."""
        maximum = torch.maximum(self.maximum, logits.amax(dim=1))
        drop = self.maximum - maximum
        scale = drop.exp()
        shifted = logits - maximum[:, None]
        exponentials = shifted.exp()
        # Before the first chunk the maximum is -inf and both sums are 0: 0 * -inf is not 0.
        moved = torch.where(self.exp_sum > 0, drop * self.exp_sum, 0)
        self.weighted_sum = scale * (self.weighted_sum + moved)
        self.weighted_sum += torch.where(shifted > -torch.inf, exponentials * shifted, 0).sum(1)
        self.exp_sum = scale * self.exp_sum + exponentials.sum(1)
        self.maximum = maximum
        columns = targets - first_column
        is_inside = (columns >= 0) & (columns < logits.shape[1])
        picked = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
        self.target_logits = torch.where(is_inside, picked, self.target_logits)


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = accumulation_dtype(hidden, weight, bias)
        wide_hidden = hidden.to(dtype)
        rows = _empty_statistics(wide_hidden)
        for start, chunk, chunk_bias in _chunks(weight, bias, options.chunk_columns, dtype):
            logits = compute_logits(wide_hidden, chunk, chunk_bias, options.law)
            rows.add(logits, targets, start)
        log_sum = rows.exp_sum.log()
        logprobs = (rows.target_logits - rows.maximum) - log_sum
        entropy = log_sum - rows.weighted_sum / rows.exp_sum
        ctx.options = options
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        biases = () if bias is None else (bias,)
        ctx.save_for_backward(hidden, weight, targets, rows.maximum, log_sum, entropy, *biases)
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
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            gradients = _Backward.from_context(ctx, grad_logprobs, grad_entropy).run()
        return (*gradients, None, None)


@dataclass(frozen=True, slots=True)
class _Backward:
    """Everything the backward pass reads, reduced to the rows with a gradient.

    Args:
        needs: Whether hidden, weight and bias need a gradient.
        grad_logprobs, grad_entropy: [rows] upstream gradients, or None.
        row_index: [rows] rows of the full input that are kept.
        hidden: [rows, hidden], in the accumulation dtype.
        targets, maximum, log_sum, entropy: [rows].
        num_rows: Rows of the full input.
    """

    needs: tuple[bool, bool, bool]
    options: _Options
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    row_index: Tensor
    hidden: Tensor
    targets: Tensor
    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    weight: Tensor
    bias: Tensor | None
    hidden_dtype: torch.dtype
    num_rows: int

    @classmethod
    def from_context(
        cls, ctx: _Context, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> _Backward:
        hidden, weight, targets, maximum, log_sum, entropy, *biases = ctx.saved_tensors
        is_active = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
        for gradient in (grad_logprobs, grad_entropy):
            if gradient is not None:
                is_active |= gradient != 0
        index = is_active.nonzero().squeeze(1)
        bias = biases[0] if biases else None
        return cls(
            needs=(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]),
            options=ctx.options,
            grad_logprobs=None if grad_logprobs is None else grad_logprobs[index],
            grad_entropy=None if grad_entropy is None else grad_entropy[index],
            row_index=index,
            hidden=hidden[index].to(accumulation_dtype(hidden, weight, bias)),
            targets=targets[index],
            maximum=maximum[index],
            log_sum=log_sum[index],
            entropy=entropy[index],
            weight=weight,
            bias=bias,
            hidden_dtype=hidden.dtype,
            num_rows=len(hidden),
        )

    def run(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, weight and bias; None where none is needed."""
        needs_hidden, needs_weight, needs_bias = self.needs
        dtype = self.hidden.dtype
        grad_hidden = torch.zeros_like(self.hidden) if needs_hidden else None
        grad_weight = torch.empty_like(self.weight) if needs_weight else None
        grad_bias = torch.empty_like(self.bias) if needs_bias and self.bias is not None else None
        columns = self.options.chunk_columns
        for start, chunk, chunk_bias in _chunks(self.weight, self.bias, columns, dtype):
            grad_logits = self._grad_logits(start, chunk, chunk_bias)
            if grad_hidden is not None:
                grad_hidden.addmm_(grad_logits, chunk)
            if grad_weight is not None:
                grad_weight[start : start + len(chunk)] = grad_logits.T @ self.hidden
            if grad_bias is not None:
                grad_bias[start : start + len(chunk)] = grad_logits.sum(0)
        if grad_hidden is None:
            return None, grad_weight, grad_bias
        scattered = grad_hidden.new_zeros(
            (self.num_rows, grad_hidden.shape[1]), dtype=self.hidden_dtype
        )
        scattered[self.row_index] = grad_hidden.to(self.hidden_dtype)
        return scattered, grad_weight, grad_bias

    def _grad_logits(self, start: int, chunk: Tensor, chunk_bias: Tensor | None) -> Tensor:
        """Gradient of hidden @ weight.T + bias for one chunk: [rows, columns]."""
        law = self.options.law
        logits = compute_logits(self.hidden, chunk, chunk_bias, law)
        log_probabilities = logits - self.maximum[:, None] - self.log_sum[:, None]
        probabilities = log_probabilities.exp()
        grad = torch.zeros_like(logits)
        if self.grad_logprobs is not None:
            grad -= self.grad_logprobs[:, None] * probabilities
            columns = self.targets - start
            rows = ((columns >= 0) & (columns < len(chunk))).nonzero().squeeze(1)
            # Added in the accumulation dtype: p - 1 of a near-certain target keeps its digits.
            grad[rows, columns[rows]] += self.grad_logprobs[rows]
        if self.grad_entropy is not None:
            surprise = log_probabilities + self.entropy[:, None]
            grad -= self.grad_entropy[:, None] * probabilities * surprise
        if law.softcap is not None:
            grad *= 1 - (logits * (law.temperature / law.softcap)).square()
        return grad / law.temperature


def _empty_statistics(hidden: Tensor) -> _RowStatistics:
    zeros = hidden.new_zeros(len(hidden))
    return _RowStatistics(torch.full_like(zeros, -torch.inf), zeros, zeros, zeros)


def _chunks(
    weight: Tensor, bias: Tensor | None, chunk_columns: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(first column, weight [columns, hidden], bias [columns]) in the accumulation dtype."""
    for start in range(0, len(weight), chunk_columns):
        stop = start + chunk_columns
        yield (
            start,
            weight[start:stop].to(dtype),
            None if bias is None else bias[start:stop].to(dtype),
        )
