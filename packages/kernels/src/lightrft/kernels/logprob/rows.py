"""Statistics of a row of logits: four numbers that merge over chunks and splits.

With M = max z, S = sum exp(z - M) and U = sum exp(z - M) (z - M) over the logits z of a row:

    logprob = (z_target - M) - log S        entropy = log S - U / S
    dL/dz = gl (onehot - p) - ge p (log p + entropy),  p = exp(z - M - log S)

for upstream gradients gl (of logprobs) and ge (of the entropy).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer, apply_transform

_VERY_NEGATIVE = -1e30


class RowStatistics(NamedTuple):
    """Reductions over some columns of the vocabulary: [tokens] each.

    Args:
        maximum: M; -inf before any column.
        exp_sum: S.
        weighted_sum: U; not computed if no entropy is requested.
        target_logits: Logit of the target, or 0 if the target is not among the columns.
    """

    maximum: Tensor
    exp_sum: Tensor
    weighted_sum: Tensor
    target_logits: Tensor

    @classmethod
    def empty(cls, num_tokens: int, like: Tensor, dtype: torch.dtype) -> RowStatistics:
        """Return the statistics of no columns."""
        zeros = torch.zeros(num_tokens, dtype=dtype, device=like.device)
        return cls(torch.full_like(zeros, -torch.inf), zeros, zeros, zeros)

    @classmethod
    def joined(cls, blocks: Iterable[RowStatistics]) -> RowStatistics:
        """Concatenate the statistics of blocks of tokens."""
        return cls(*map(torch.cat, zip(*blocks, strict=True)))

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Return the statistics of the union of two disjoint sets of columns."""
        maximum = torch.maximum(self.maximum, other.maximum)
        reference = _finite(maximum)
        exp_sum, weighted_sum = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for part in (self, other):
            drop = part.maximum - reference
            scale = drop.exp()
            # A part without columns has maximum -inf and sums 0, and 0 * -inf is NaN.
            moved = torch.where(part.exp_sum > 0, drop * part.exp_sum, 0)
            exp_sum = exp_sum + scale * part.exp_sum
            weighted_sum = weighted_sum + scale * (part.weighted_sum + moved)
        return RowStatistics(
            maximum, exp_sum, weighted_sum, self.target_logits + other.target_logits
        )

    @property
    def log_sum(self) -> Tensor:
        """Logarithm of S."""
        return self.exp_sum.log()

    @property
    def logprobs(self) -> Tensor:
        """Log-probability of the targets; rounding never makes it positive."""
        return ((self.target_logits - self.maximum) - self.log_sum).clamp(max=0)

    @property
    def entropy(self) -> Tensor:
        """Entropy in nats."""
        return self.log_sum - self.weighted_sum / self.exp_sum


# Most that a logit may exceed the reference of its row before the sums are rescaled. Terms of a sum
# stay far from overflow, and nearly all blocks of a row share one reference.
_MAX_RISE = 4.0


@dataclass(slots=True)
class RunningRows:
    """Statistics of rows whose logits arrive in blocks, without a tensor per block.

    Sums are relative to a `reference` of each row, not to its maximum. Blocks share a reference,
    since it changes only when a logit rises far above it.

    Args:
        targets: [tokens] int64 columns of the targets.
        maximum, target_logits: Statistics as in `RowStatistics`.
        reference: [tokens], finite after the first block.
        exp_sum, weighted_sum: [tokens] as in `RowStatistics`, relative to `reference`.
        has_reference: Whether a block was added.
    """

    targets: Tensor
    maximum: Tensor
    target_logits: Tensor
    reference: Tensor
    exp_sum: Tensor
    weighted_sum: Tensor
    has_reference: bool = False

    @classmethod
    def empty(cls, targets: Tensor, dtype: torch.dtype) -> RunningRows:
        """Return running statistics of no columns."""
        zeros = torch.zeros(len(targets), dtype=dtype, device=targets.device)
        nothing = torch.full_like(zeros, -torch.inf)
        return cls(targets, nothing, zeros, nothing, zeros, zeros)

    def add(self, logits: Tensor, first_column: int, *, scratch: Tensor | None) -> bool:
        """Add a block [tokens, columns], overwriting its logits by exp(logits - reference).

        Args:
            logits: Logits of the columns from `first_column` on; overwritten.
            first_column: Column of the vocabulary at which the block starts.
            scratch: Memory like `logits`, for the entropy; None omits the entropy.

        Returns:
            Whether the references changed, so that earlier blocks have others.
        """
        num_columns = logits.shape[1]
        columns = self.targets - first_column
        is_inside = (columns >= 0) & (columns < num_columns)
        picked = logits.gather(1, columns.clamp_(0, num_columns - 1)[:, None]).squeeze(1)
        self.target_logits = torch.where(is_inside, picked, self.target_logits)
        self.maximum = torch.maximum(self.maximum, logits.amax(dim=1))
        is_new = self._move_reference()
        if scratch is None:
            exponentials = logits.sub_(self.reference[:, None]).exp_()
        else:
            torch.sub(logits, self.reference[:, None], out=scratch)
            exponentials = torch.exp(scratch, out=logits)
            # 0 * -inf is NaN, 0 times a very negative number is 0.
            weighted = scratch.clamp_(min=_VERY_NEGATIVE).mul_(exponentials)
            self.weighted_sum = self.weighted_sum + weighted.sum(1)
        self.exp_sum = self.exp_sum + exponentials.sum(1)
        return is_new

    def statistics(self) -> RowStatistics:
        """Return the statistics of all blocks so far."""
        drop = self.reference - _finite(self.maximum)
        scale = drop.exp()
        exp_sum, weighted_sum = self._moved(drop, scale)
        return RowStatistics(self.maximum, exp_sum, weighted_sum, self.target_logits)

    def _move_reference(self) -> bool:
        if not bool((self.maximum > self.reference + _MAX_RISE).any()) and self.has_reference:
            return False
        self.has_reference = True
        reference = _finite(self.maximum)
        drop = self.reference - reference
        self.exp_sum, self.weighted_sum = self._moved(drop, drop.exp())
        self.reference = reference
        return True

    def _moved(self, drop: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums relative to references that are higher by -drop."""
        # Before any column the reference is -inf and the sums are 0, and 0 * -inf is NaN.
        moved = torch.where(self.exp_sum > 0, drop * self.exp_sum, 0)
        return scale * self.exp_sum, scale * (self.weighted_sum + moved)


class GradRows(NamedTuple):
    """Rows that have a gradient, with the inputs of their backward pass.

    Args:
        hidden: [rows, hidden], in the dtype of the products.
        targets: Column of the target, [rows] int64; outside the weight if it lies elsewhere.
        maximum, log_sum, logprobs, entropy: Statistics of the whole vocabulary, [rows] each.
        grad_logprobs, grad_entropy: Upstream gradients, [rows] each, or None.
    """

    hidden: Tensor
    targets: Tensor
    maximum: Tensor
    log_sum: Tensor
    logprobs: Tensor
    entropy: Tensor
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None

    def block(self, own: slice) -> GradRows:
        """Return some of the rows."""
        return GradRows._make(None if values is None else values[own] for values in self)


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selection of rows that count, gathered if the host may wait for their number.

    Args:
        mask: Mask of the rows that count, [tokens] bool.
        index: Places of the rows, [rows] int64; None keeps every row, so that shapes are known.
        padding: Number of rows appended.
        smallest, largest: Range of the checked values; 0 if none were checked.
    """

    mask: Tensor
    index: Tensor | None
    padding: int
    smallest: int
    largest: int

    def take(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return the selected rows of [tokens, ...], padded with `fill`."""
        rows = values if self.index is None else values[self.index]
        if self.padding == 0:
            return rows
        sides = (0, 0) * (rows.dim() - 1)
        return F.pad(rows, (*sides, 0, self.padding), value=fill)

    def place(self, values: Tensor, fill: float) -> Tensor:
        """Return values [rows] in their places among all tokens, with `fill` elsewhere."""
        if self.index is None:
            return torch.where(self.mask, values[: len(self.mask)], fill)
        everywhere = torch.full_like(self.mask, fill, dtype=values.dtype)
        return everywhere.index_copy_(0, self.index, values[: len(self.index)])

    def spread(self, rows: Tensor) -> Tensor:
        """Return rows [rows, ...] among all tokens; rows that do not count must be 0."""
        if self.index is None:
            return rows[: len(self.mask)]
        everywhere = rows.new_zeros((len(self.mask), *rows.shape[1:]))
        return everywhere.index_copy_(0, self.index, rows[: len(self.index)])


def select_rows(
    mask: Tensor,
    values: Tensor | None = None,
    bound: int = 0,
    *,
    multiple: int = 1,
    is_static: bool | None = None,
) -> RowSelection:
    """Select rows with one transfer to the host, or with none while CUDA records a graph.

    Args:
        mask: Mask of rows, [tokens] bool.
        values: Values to check under the mask, [tokens] int64, or None. Without a transfer, the
            device asserts that they lie in [0, bound).
        bound: Exclusive bound of `values`.
        multiple: Divisor of the padded number of rows.
        is_static: Whether to keep every row and transfer nothing; None for only while recording.
    """
    if is_static is None:
        is_static = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if values is not None:
        values = torch.where(mask, values, 0)
    if is_static:
        if values is not None:
            is_inside = ((values >= 0) & (values < bound)).all()
            torch._assert_async(is_inside, f"targets must lie in [0, {bound})")
        return RowSelection(mask, None, -len(mask) % multiple, 0, 0)
    numbers = [mask.sum()]
    if values is not None and len(values) > 0:
        numbers += torch.aminmax(values)
    count, *bounds = torch.stack(numbers).tolist()
    smallest, largest = bounds or (0, 0)
    index = None
    if count < len(mask):
        index = torch.nonzero_static(mask, size=count).squeeze(1)
    return RowSelection(mask, index, -count % multiple, smallest, largest)


def grad_of_logits(
    logits: Tensor, rows: GradRows, first_column: int, transform: LogitsTransform
) -> Tensor:
    """Return the gradient of hidden @ weight.T + bias for one chunk.

    Args:
        logits: [rows, columns] after softcap and temperature; overwritten.
        rows: Rows with their upstream gradients.
        first_column: Column of the vocabulary at which the chunk starts.
        transform: Softcap and temperature.

    Returns:
        [rows, columns] in the dtype of `logits`.
    """
    columns = rows.targets - first_column
    inside = ((columns >= 0) & (columns < logits.shape[1])).nonzero().squeeze(1)
    columns = columns[inside]
    # With expm1, 1 - p of a near-certain target keeps its digits.
    target_logprobs = rows.logprobs[inside]
    target_grad = torch.zeros_like(target_logprobs)
    if rows.grad_logprobs is not None:
        target_grad -= rows.grad_logprobs[inside] * target_logprobs.expm1()
    slope = None
    if transform.softcap is not None:
        ratio = (logits * (transform.temperature / transform.softcap)).clamp_(min=-1)
        slope = ratio.square_().neg_().add_(1)
    # Recomputed logits may be rounded differently, so the difference may be positive.
    log_probabilities = logits.sub_(rows.maximum[:, None]).sub_(rows.log_sum[:, None])
    log_probabilities.clamp_(max=0)
    if rows.grad_entropy is None:
        grad = log_probabilities.exp_()
        if rows.grad_logprobs is not None:
            grad *= -rows.grad_logprobs[:, None]
    else:
        grad_entropy = rows.grad_entropy
        surprise = target_logprobs + rows.entropy[inside]
        target_grad -= grad_entropy[inside] * target_logprobs.exp() * surprise
        grad = log_probabilities.exp()
        constant = grad_entropy * rows.entropy
        if rows.grad_logprobs is not None:
            constant = constant + rows.grad_logprobs
        factors = log_probabilities.clamp_(min=_VERY_NEGATIVE).mul_(-grad_entropy[:, None])
        grad *= factors.sub_(constant[:, None])
    grad[inside, columns] = target_grad
    if slope is not None:
        grad *= slope
    return grad if transform.temperature == 1 else grad.div_(transform.temperature)


def finish_target_logits(products: Tensor, layer: OutputLayer, targets: Tensor) -> Tensor:
    """Return the targets' logits from their products [tokens]; 0 if the target is outside."""
    num_columns = len(layer.weight)
    is_here = (targets >= 0) & (targets < num_columns)
    bias = None
    if layer.bias is not None and num_columns > 0:
        bias = layer.bias[targets.clamp(0, num_columns - 1)].to(products.dtype)
    return torch.where(is_here, apply_transform(products, bias, layer.transform), 0)


def _finite(maximum: Tensor) -> Tensor:
    """Return the maximum, or 0 if it is -inf, since -inf - -inf is NaN."""
    return torch.where(maximum > -torch.inf, maximum, 0)
