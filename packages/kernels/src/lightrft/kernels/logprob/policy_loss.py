"""Policy loss evaluated inside the output layer, with three matrix products instead of four.

The logits of some tokens are computed once. Their statistics give logprobs, the loss gives the
gradient of those, and the stored logits become gradients in place. This needs a loss whose
normaliser is known beforehand: dL/dlogprob of a token must depend only on tokens of its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.kernels.logprob.blocks import ChunkedEngine, LayerGradients, StoredLogits
from lightrft.kernels.logprob.passes import add_product_, chunks, write_product
from lightrft.kernels.logprob.product_engine import ProductEngine, target_products
from lightrft.kernels.logprob.rows import (
    GradRows,
    RowStatistics,
    finish_target_logits,
    select_rows,
)
from lightrft.kernels.logprob.selection import choose_loss_engine
from lightrft.kernels.logprob.types import (
    EntropyMode,
    LogitsTransform,
    OutputLayer,
    accumulation_dtype,
    leading,
    validate_bounds,
    validate_options,
    validate_tensors,
)


class TokenLossFunction(Protocol):
    """Loss of some tokens with its derivatives, called once for every chunk of tokens."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (loss [], dloss/dlogprobs [rows], dloss/dentropy [rows] or None) of a chunk.

        Args:
            logprobs, entropy: [rows] float32, detached; the entropy is 0 if it is not computed.
            rows: Indices of the tokens, [rows] int64.
        """


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Result of `linear_policy_loss`.

    Args:
        loss: Sum of the chunks' losses, [] float32; its gradient reaches hidden, weight, bias.
        logprobs: [tokens] float32, detached; 0 for ignored tokens.
        entropy: Entropy, likewise, or None if it was not requested.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None


CHUNK_COLUMNS = 16384


@dataclass(frozen=True, slots=True)
class LossWorkspace:
    """Memory for a loss inside the output layer on a kind of device.

    Args:
        budget_bytes: Bytes of logits stored at a time, unless `min_tokens` need more.
        min_tokens: Tokens of a chunk below which products are slow.
        max_tokens: Tokens of a chunk beyond which nothing is gained.
        row_multiple: Divisor of the tokens of a chunk, if there are several chunks.
    """

    budget_bytes: int
    min_tokens: int
    max_tokens: int
    row_multiple: int = 1


WORKSPACES = {
    # Little compared to the weights' gradient in float32; whole tiles of the products.
    "cuda": LossWorkspace(2**31, 1024, 8192, row_multiple=128),
    # More is not faster, and products of fewer than 256 tokens are slow.
    "cpu": LossWorkspace(2**26, 256, 1024),
}


def linear_policy_loss(  # noqa: PLR0913 - one operation with many independent options
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLossFunction,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    entropy: EntropyMode = "grad",
    chunk_tokens: int | None = None,
    logits_budget_bytes: int | None = None,
    num_tokens: int | None = None,
) -> PolicyLossOutput:
    """Compute a policy loss of the targets' logprobs and entropies, together with its gradients.

    It costs three matrix products; `linear_logprob` and its backward pass cost four. It stores the
    logits of a chunk of tokens until their gradient is known.

    Args:
        hidden, weight, targets: [tokens, hidden], [vocab, hidden] and [tokens] int64.
        token_loss: Loss of a chunk of tokens, called in order; the losses are added. Its
            normaliser must not depend on the chunk.
        bias, temperature, softcap: Options as in `linear_logprob`.
        ignore_index: Target of ignored rows; None if every target counts. The host then never waits
            for the device, where a target beyond the vocabulary ends the program.
        entropy: Mode: "none" computes none; with "value" `token_loss` must return no gradient
            for it.
        chunk_tokens: Most tokens of a chunk; None for as many as the budget holds.
        logits_budget_bytes: Bytes of logits stored at a time; the other logits are computed twice.
            None takes the device's row of `WORKSPACES`.
        num_tokens: Number of tokens as in `linear_logprob`.

    Raises:
        ValueError: A shape, dtype, target, option or result of `token_loss` is invalid.
    """
    validate_tensors(hidden, weight, targets, bias)
    validate_options(temperature, softcap, entropy, "auto")
    _validate_sizes(chunk_tokens, logits_budget_bytes)
    num_rows = len(weight[:num_tokens])
    active = active_tokens(targets, num_rows, ignore_index, is_device=targets.is_cuda)
    chunk_tokens, budget = plan_loss(
        len(active), hidden, weight, chunk_tokens=chunk_tokens, budget_bytes=logits_budget_bytes
    )
    options = PolicyLossOptions(
        choose_loss_engine(hidden, weight, chunk_columns=CHUNK_COLUMNS),
        token_loss,
        tuple(active[i : i + chunk_tokens] for i in range(0, len(active), chunk_tokens)),
        budget,
        entropy,
        num_tokens,
    )
    transform = LogitsTransform.of(temperature, softcap)
    with torch.autocast(hidden.device.type, enabled=False):
        loss, logprobs, entropies = LinearPolicyLoss.apply(  # type: ignore[no-untyped-call, unused-ignore]
            hidden, weight, bias, targets, transform, options
        )
    return PolicyLossOutput(loss, logprobs, None if entropy == "none" else entropies)


def active_tokens(
    targets: Tensor, vocab_size: int, ignore_index: int | None, *, is_device: bool
) -> Tensor:
    """Return indices of targets that count, [rows] int64, with at most one wait for the device."""
    mask = torch.ones_like(targets, dtype=torch.bool)
    if ignore_index is not None:
        mask = targets != ignore_index
    is_static = is_device and ignore_index is None
    chosen = select_rows(mask, targets, vocab_size, is_static=is_static)
    validate_bounds(chosen.smallest, chosen.largest, vocab_size, ignore_index)
    return torch.arange(len(mask), device=mask.device) if chosen.index is None else chosen.index


@dataclass(frozen=True, slots=True)
class PolicyLossOptions:
    """Arguments of the loss that are not differentiated.

    Args:
        engine: Engine that computes and stores products.
        token_loss: Loss of a chunk of tokens.
        row_chunks: Tokens of each chunk, [rows] int64 each, without ignored tokens.
        budget_bytes: Bytes of logits stored at a time.
        entropy, num_tokens: Options as in `linear_policy_loss`.
    """

    engine: ProductEngine | ChunkedEngine
    token_loss: TokenLossFunction
    row_chunks: tuple[Tensor, ...]
    budget_bytes: int
    entropy: EntropyMode
    num_tokens: int | None = None


@dataclass(slots=True)
class _Totals:
    """Sums over the chunks of tokens."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    gradients: LayerGradients


class _Context(Protocol):
    """Part of autograd's context that is used here."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    gradients: list[Tensor | None] | None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark outputs without gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether a missing upstream gradient is passed as zeros."""


class LinearPolicyLoss(torch.autograd.Function):
    """Loss and gradients, computed together; the backward pass scales the gradients."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitsTransform,
        options: PolicyLossOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, logprobs, entropy) of `PolicyLossOutput`."""
        layer = OutputLayer(
            weight[: options.num_tokens], leading(bias, options.num_tokens), transform
        )
        wide = accumulation_dtype(hidden, weight, bias)
        inputs = (hidden, weight, bias)
        dtypes = (wide, _dtype_of_sum(weight, options, wide), wide)
        sums = [
            torch.zeros_like(like, dtype=dtype) if is_needed and like is not None else None
            for like, dtype, is_needed in zip(inputs, dtypes, ctx.needs_input_grad, strict=False)
        ]
        totals = _Totals(
            loss=hidden.new_zeros((), dtype=wide),
            logprobs=hidden.new_zeros(len(hidden), dtype=wide),
            entropy=hidden.new_zeros(len(hidden), dtype=wide),
            gradients=LayerGradients(
                sums[0], *(leading(each, options.num_tokens) for each in sums[1:])
            ),
        )
        _add_chunks(totals, hidden, layer, targets, options)
        # Not saved tensors, which cannot be scaled in place: a second copy of the weight's gradient
        # would be the largest tensor of the step. Float16 gradients are cast after the upstream
        # gradient is applied, which may be the scale that prevents underflow.
        ctx.gradients = [
            gradient
            if gradient is None or tensor is None or tensor.dtype == torch.float16
            else gradient.to(tensor.dtype)
            for gradient, tensor in zip(sums, inputs, strict=True)
        ]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(totals.logprobs, totals.entropy)
        return totals.loss, totals.logprobs, totals.entropy

    @staticmethod
    def backward(
        ctx: _Context, grad_loss: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Scale the gradients by the upstream one, a number, and return them."""
        if grad_loss is None:
            return (None,) * 6
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "linear_policy_loss was differentiated before: its gradients are handed over, not "
                "kept; call it again, or add up the losses before one backward pass"
            )
        inputs = ctx.saved_tensors
        factor = grad_loss.detach()
        # On a CPU reading the number is free, unlike a pass over dL/dweight.
        is_scaled = factor.is_cuda or bool(factor != 1)
        scaled = [
            None
            if each is None or tensor is None
            else (each.mul_(factor) if is_scaled else each).to(tensor.dtype)
            for each, tensor in zip(gradients, inputs, strict=True)
        ]
        gradients.clear()
        if torch.is_grad_enabled():
            scaled = [
                None if each is None else _Undifferentiable.apply(each, *inputs)  # type: ignore[no-untyped-call, unused-ignore]
                for each in scaled
            ]
        return (*scaled, None, None, None)


def _dtype_of_sum(weight: Tensor, options: PolicyLossOptions, wide: torch.dtype) -> torch.dtype:
    """Return the dtype for summing dL/dweight: bfloat16 if one chunk of tokens writes it.

    Then each number is rounded once either way. Float16 is cast after the upstream gradient.
    """
    is_written_once = isinstance(options.engine, ProductEngine) and len(options.row_chunks) == 1
    return torch.bfloat16 if is_written_once and weight.dtype == torch.bfloat16 else wide


class _Undifferentiable(torch.autograd.Function):
    """Gradient that raises an error when differentiated, instead of dropping a term."""

    @staticmethod
    def forward(ctx: object, gradient: Tensor, *inputs: Tensor | None) -> Tensor:
        del ctx, inputs
        return gradient

    @staticmethod
    def backward(ctx: object, *_: Tensor) -> NoReturn:
        raise RuntimeError(
            "linear_policy_loss has no second derivative: expected a single backward pass through "
            "it, got a gradient of its gradient; use a loss of linear_logprob(impl='reference')"
        )


def up_to_multiple(number: int, multiple: int) -> int:
    """Return the number, rounded up to a multiple."""
    return -(-number // multiple) * multiple


def plan_loss(
    num_tokens: int,
    hidden: Tensor,
    weight: Tensor,
    *,
    chunk_tokens: int | None = None,
    budget_bytes: int | None = None,
) -> tuple[int, int]:
    """Plan chunks of tokens of about equal size, whose logits fit the budget.

    Args:
        num_tokens: Number of tokens that count.
        hidden, weight: Inputs; only device, dtype and number of columns are read.
        chunk_tokens, budget_bytes: Requested values; None takes those of `WORKSPACES`.

    Returns:
        (most tokens of a chunk, bytes of logits stored at a time).
    """
    space = WORKSPACES["cuda" if hidden.is_cuda else "cpu"]
    row_bytes = max(1, len(weight) * accumulation_dtype(hidden, weight).itemsize)
    budget = space.budget_bytes if budget_bytes is None else budget_bytes
    if chunk_tokens is None:
        most = min(max(budget // row_bytes, space.min_tokens), space.max_tokens)
        most = max(1, most // space.row_multiple) * space.row_multiple
        num_chunks = max(1, -(-num_tokens // most))
        chunk_tokens = max(1, up_to_multiple(-(-num_tokens // num_chunks), space.row_multiple))
    if budget_bytes is None and not hidden.is_cuda:
        budget = chunk_tokens * row_bytes
    return chunk_tokens, budget


def _add_chunks(
    totals: _Totals, hidden: Tensor, layer: OutputLayer, targets: Tensor, options: PolicyLossOptions
) -> None:
    """Add loss and gradients of all chunks of tokens to the totals."""
    engine, size = options.engine, 0
    if isinstance(engine, ChunkedEngine):
        most = max((len(rows) for rows in options.row_chunks), default=0) * len(layer.weight)
        size = min(most, options.budget_bytes // totals.logprobs.dtype.itemsize)
    # Reused by all chunks: on a CPU fresh memory costs as much as a pass over it.
    store = totals.logprobs.new_empty(size)
    for rows in options.row_chunks:
        kept: StoredLogits | _Forward
        if isinstance(engine, ProductEngine):
            kept = _Forward.run(hidden[rows], layer, targets[rows], engine, options)
        else:
            kept = StoredLogits.compute(
                hidden[rows].to(totals.logprobs.dtype),
                layer,
                targets[rows],
                store,
                needs_entropy=options.entropy != "none",
                keeps_logits=options.entropy == "grad" or layer.transform.softcap is not None,
            )
        grad_rows = _rows_with_loss(totals, kept, targets, rows, options)
        if any(each is not None for each in totals.gradients):
            kept.add_gradients(totals.gradients, grad_rows, rows)


def _rows_with_loss(
    totals: _Totals,
    kept: StoredLogits | _Forward,
    targets: Tensor,
    rows: Tensor,
    options: PolicyLossOptions,
) -> GradRows:
    """Compute the loss of a chunk and add it; return the rows for its gradients."""
    statistics, num_rows = kept.statistics, len(rows)
    has_entropy = options.entropy != "none"
    logprobs = statistics.logprobs[:num_rows]
    entropy = statistics.entropy[:num_rows] if has_entropy else torch.zeros_like(logprobs)
    totals.logprobs[rows] = logprobs
    totals.entropy[rows] = entropy
    with torch.enable_grad():
        loss, grad_logprobs, grad_entropy = options.token_loss(logprobs, entropy, rows)
    _validate_token_loss(loss, grad_logprobs, grad_entropy, len(rows))
    if grad_entropy is not None and options.entropy != "grad":
        raise ValueError(
            "token_loss gave a gradient for the entropy: pass entropy='grad', got "
            f"{options.entropy!r}"
        )
    totals.loss += loss.detach()
    missing = len(kept.hidden) - num_rows

    def padded(values: Tensor) -> Tensor:
        return F.pad(values, (0, missing)) if missing else values

    return GradRows(
        hidden=kept.hidden,
        targets=kept.targets,
        maximum=statistics.maximum,
        log_sum=statistics.log_sum,
        logprobs=padded(logprobs),
        entropy=padded(entropy),
        grad_logprobs=padded(grad_logprobs.detach().to(logprobs.dtype)),
        grad_entropy=(
            None if grad_entropy is None else padded(grad_entropy.detach().to(entropy.dtype))
        ),
    )


@dataclass(slots=True)
class _Forward:
    """Statistics of some tokens, and kept products.

    Rows of zeros pad the tokens to a multiple with which products are fast. Their targets are
    outside of the vocabulary and their upstream gradients are 0.
    """

    hidden: Tensor
    targets: Tensor
    statistics: RowStatistics
    kept: list[Tensor]
    layer: OutputLayer
    engine: ProductEngine

    @classmethod
    def run(
        cls,
        hidden: Tensor,
        layer: OutputLayer,
        targets: Tensor,
        engine: ProductEngine,
        options: PolicyLossOptions,
    ) -> _Forward:
        needs_entropy = options.entropy != "none"
        dtype = engine.product_dtype(hidden, layer.weight)
        missing = -len(hidden) % engine.row_multiple
        hidden = hidden.to(dtype)
        if missing:
            hidden = F.pad(hidden, (0, 0, 0, missing))
            targets = F.pad(targets, (0, missing), value=-1)
        wanted = target_products(hidden, layer.weight, targets)
        statistics = RowStatistics.empty(len(hidden), hidden, wanted.dtype)
        kept: list[Tensor] = []
        num_bytes = 0
        for _, _, chunk in chunks(layer, engine.chunk_columns, dtype):
            products = engine.products(hidden, chunk)
            part = engine.fold(products, chunk, targets, needs_entropy=needs_entropy)
            statistics = statistics.merge(part)
            num_bytes += products.nbytes
            if num_bytes <= options.budget_bytes:
                kept.append(products)
        exact = finish_target_logits(wanted, layer, targets)
        statistics = statistics._replace(target_logits=exact)
        return cls(hidden, targets, statistics, kept, layer, engine)

    def add_gradients(self, totals: LayerGradients, rows: GradRows, places: Tensor) -> None:
        """Implement `StoredLogits.add_gradients`, from kept or recomputed products."""
        grad_chunk = None
        if totals.hidden is not None:
            grad_chunk = torch.zeros_like(self.hidden, dtype=totals.hidden.dtype)
        for start, stop, chunk, products in self._stored():
            grad = self.engine.grad_of_products(products, rows, chunk, start)
            if grad_chunk is not None:
                add_product_(grad_chunk, grad, chunk.weight)
            if totals.weight is not None and totals.weight.dtype == torch.bfloat16:
                # No other chunk of tokens adds to it.
                write_product(totals.weight[start:stop], grad.T, self.hidden)
            elif totals.weight is not None:
                add_product_(totals.weight[start:stop], grad.T, self.hidden)
            if totals.bias is not None:
                totals.bias[start:stop] += grad.sum(0, dtype=totals.bias.dtype)
        if totals.hidden is not None and grad_chunk is not None:
            totals.hidden[places] = grad_chunk[: len(places)]

    def _stored(self) -> Iterator[tuple[int, int, OutputLayer, Tensor]]:
        """Yield (first column, end, chunk, its products), kept or recomputed, and free them."""
        dtype = self.hidden.dtype
        self.kept.reverse()
        for start, stop, chunk in chunks(self.layer, self.engine.chunk_columns, dtype):
            is_kept = bool(self.kept)
            products = self.kept.pop() if is_kept else self.engine.products(self.hidden, chunk)
            yield start, stop, chunk, products


def _validate_sizes(chunk_tokens: int | None, logits_budget_bytes: int | None) -> None:
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive: got {chunk_tokens}")
    if logits_budget_bytes is not None and logits_budget_bytes < 0:
        raise ValueError(f"logits_budget_bytes must not be negative: got {logits_budget_bytes}")


def _validate_token_loss(
    loss: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None, num_rows: int
) -> None:
    shapes = [tuple(grad_logprobs.shape)]
    if grad_entropy is not None:
        shapes.append(tuple(grad_entropy.shape))
    if loss.dim() != 0 or any(shape != (num_rows,) for shape in shapes):
        raise ValueError(
            "token_loss must return (loss [], dloss/dlogprobs [rows], dloss/dentropy [rows] or "
            f"None) for {num_rows} rows: got loss {tuple(loss.shape)} and gradients {shapes}"
        )
