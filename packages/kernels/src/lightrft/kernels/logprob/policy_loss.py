"""A policy loss evaluated inside the output layer: three matrix products instead of four.

The logits of some tokens are computed once: their statistics give logprobs, the loss gives the
gradient of those, and the stored logits become gradients in place. It serves losses whose
normaliser is known beforehand, so that dL/dlogprob of a token depends on tokens of its chunk only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from lightrft.kernels.logprob import validation
from lightrft.kernels.logprob.passes import chunks
from lightrft.kernels.logprob.product_engine import ProductEngine, target_products
from lightrft.kernels.logprob.products import add_product_
from lightrft.kernels.logprob.rows import (
    GradRows,
    RowStatistics,
    finish_target_logits,
    scale_into_range,
)
from lightrft.kernels.logprob.selection import Request, select_product_engine
from lightrft.kernels.logprob.types import (
    LogitsTransform,
    OutputLayer,
    Precision,
    accumulation_dtype,
)


class TokenLossFunction(Protocol):
    """The loss of some tokens and its derivatives; called once for every chunk of tokens."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss of a chunk: (loss [], dloss/dlogprobs [rows], dloss/dentropy [rows] or None).

        Args:
            logprobs, entropy: [rows] float32, detached.
            rows: [rows] int64, which tokens they are.
        """


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """What `linear_policy_loss` returns.

    Args:
        loss: [] float32, the sum of the chunks' losses; differentiable.
        logprobs, entropy: [tokens] float32, detached; 0 where the token is ignored.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor


DEFAULT_CHUNK_COLUMNS = 16384
# A chunk of tokens shrinks until its logits fit the budget, but not below this: the weight's
# gradient is read and written once for each chunk.
_MIN_FITTING_TOKENS = 512


def linear_policy_loss(  # noqa: PLR0913 - one operation with many independent options
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLossFunction,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    precision: Precision = "fp32",
    chunk_tokens: int = 4096,
    sequence_starts: Tensor | None = None,
    logits_budget_bytes: int = 2**31,
) -> PolicyLossOutput:
    """A policy loss of the targets' logprobs and entropies, computed with its gradients at once.

    It costs three matrix products where `linear_logprob` and its backward pass cost four, because
    the logits of a chunk of tokens are stored until their gradient is known.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        targets: [tokens] int64, or `ignore_index`.
        token_loss: Called once for every chunk of tokens, in order; the losses are added. Its
            normaliser must not depend on the chunk.
        bias, temperature, softcap, ignore_index, precision: As in `linear_logprob`.
        chunk_tokens: Most tokens of a chunk.
        sequence_starts: [sequences] int64 ascending from 0. A chunk then holds whole sequences,
            for losses that couple the tokens of one; a sequence longer than `chunk_tokens` is a
            chunk of its own. None: chunks begin anywhere.
        logits_budget_bytes: Logits stored at a time. Chunks shrink to fit; logits that still do
            not are computed twice.

    Returns:
        The loss, whose gradient reaches hidden, weight and bias, and the detached values.

    Raises:
        ValueError: A shape, dtype, target, option or result of `token_loss` is invalid.
    """
    validation.validate_tensors(hidden, weight, targets, bias)
    validation.validate_options(temperature, softcap, "grad", "auto", precision, True)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive: got {chunk_tokens}")
    if logits_budget_bytes < 0:
        raise ValueError(f"logits_budget_bytes must not be negative: got {logits_budget_bytes}")
    active = (targets != ignore_index).nonzero().squeeze(1)
    validation.validate_targets(targets[active], len(weight), ignore_index)
    request = Request(
        "auto", precision, True, "value", temperature, bias is not None, softcap is not None,
        DEFAULT_CHUNK_COLUMNS,
    )  # fmt: skip
    engine = select_product_engine(request, hidden, weight)
    fitting = logits_budget_bytes // (len(weight) * engine.logit_bytes(hidden, weight))
    if fitting >= _MIN_FITTING_TOKENS:
        chunk_tokens = min(chunk_tokens, fitting // 128 * 128)
    options = PolicyLossOptions(
        engine=engine,
        token_loss=token_loss,
        row_chunks=plan_row_chunks(active, len(targets), chunk_tokens, sequence_starts),
        logits_budget_bytes=logits_budget_bytes,
    )
    transform = LogitsTransform.of(temperature, softcap)
    with torch.autocast(hidden.device.type, enabled=False):
        loss, logprobs, entropy = LinearPolicyLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, transform, options
        )
    return PolicyLossOutput(loss, logprobs, entropy)


@dataclass(frozen=True, slots=True)
class PolicyLossOptions:
    """Everything that is not a tensor to differentiate.

    Args:
        engine: How products are computed and stored.
        token_loss: The loss.
        row_chunks: Tokens of each chunk, [rows] int64 each; ignored tokens are in none.
        logits_budget_bytes: Logits stored at a time; those beyond it are computed twice.
    """

    engine: ProductEngine
    token_loss: TokenLossFunction
    row_chunks: tuple[Tensor, ...]
    logits_budget_bytes: int


@dataclass(slots=True)
class _Totals:
    """Sums over the chunks of tokens; a gradient is None where it is not needed."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


class _Context(Protocol):
    """The part of autograd's context that is used here."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    is_present: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for the backward pass."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Outputs without gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether a missing upstream gradient comes as zeros."""


class LinearPolicyLoss(torch.autograd.Function):
    """Computes loss and gradients together; the backward pass scales them."""

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
        """(loss, logprobs, entropy) of `PolicyLossOutput`."""
        layer = OutputLayer(weight, bias, transform)
        wide = accumulation_dtype(hidden, weight, bias)
        needs = ctx.needs_input_grad

        def zeros(like: Tensor | None, is_needed: bool) -> Tensor | None:
            return torch.zeros_like(like, dtype=wide) if is_needed and like is not None else None

        totals = _Totals(
            loss=torch.zeros((), dtype=wide, device=hidden.device),
            logprobs=torch.zeros(len(hidden), dtype=wide, device=hidden.device),
            entropy=torch.zeros(len(hidden), dtype=wide, device=hidden.device),
            grad_hidden=zeros(hidden, needs[0]),
            grad_weight=zeros(weight, needs[1]),
            grad_bias=zeros(bias, needs[2]),
        )
        for rows in options.row_chunks:
            _add_chunk(totals, hidden, layer, targets, rows, options)
        gradients = (totals.grad_hidden, totals.grad_weight, totals.grad_bias)
        inputs = (hidden, weight, bias)
        # Float16 waits for the upstream gradient, which may be the scale that keeps it from 0.
        narrow = [
            gradient if tensor.dtype == torch.float16 else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, inputs, strict=True)
            if gradient is not None and tensor is not None
        ]
        ctx.is_present = tuple(gradient is not None for gradient in gradients)
        ctx.save_for_backward(hidden, weight, bias, *narrow)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(totals.logprobs, totals.entropy)
        return totals.loss, totals.logprobs, totals.entropy

    @staticmethod
    def backward(
        ctx: _Context, grad_loss: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Scales the stored gradients by the upstream one, a number."""
        if grad_loss is None:
            return (None,) * 6
        # Read once: a checkpoint gives saved tensors away when they are first asked for.
        hidden, weight, bias, *narrow = ctx.saved_tensors
        inputs, stored = (hidden, weight, bias), iter(narrow)
        gradients: list[Tensor | None] = [None] * 6
        for place, tensor in enumerate(inputs):
            if ctx.is_present[place] and tensor is not None:
                gradient = (next(stored) * grad_loss).to(tensor.dtype)
                gradients[place] = _Undifferentiable.apply(gradient, *inputs)  # type: ignore[no-untyped-call]
        return tuple(gradients)


class _Undifferentiable(torch.autograd.Function):
    """A gradient that says, instead of dropping a term, that it has no gradient itself."""

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


def plan_row_chunks(
    active: Tensor, num_tokens: int, chunk_tokens: int, sequence_starts: Tensor | None
) -> tuple[Tensor, ...]:
    """Cuts the tokens that count into chunks, at borders of sequences if those are given.

    Args:
        active: [rows] int64 ascending, tokens that are not ignored.
        num_tokens: All tokens.
        chunk_tokens: Most rows of a chunk; a longer sequence is a chunk of its own.
        sequence_starts: [sequences] int64 ascending, first token of each sequence; None lets
            chunks begin anywhere.

    Raises:
        ValueError: The starts do not ascend from 0 within the tokens.
    """
    if sequence_starts is None:
        firsts = range(0, len(active), chunk_tokens)
        return tuple(active[first : first + chunk_tokens] for first in firsts)
    starts = sequence_starts.tolist()
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] > num_tokens:
        raise ValueError(
            f"sequence_starts must ascend from 0 to at most {num_tokens}: got {starts[:8]}"
        )
    borders = torch.searchsorted(active, sequence_starts.to(active.device)).tolist()
    cuts = [0]
    ends = [*borders[1:], len(active)]
    for start, end in zip(borders, ends, strict=True):
        if end - cuts[-1] > chunk_tokens and start > cuts[-1]:
            cuts.append(start)
    cuts.append(len(active))
    return tuple(active[start:stop] for start, stop in pairwise(cuts) if stop > start)


def _add_chunk(
    totals: _Totals,
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    rows: Tensor,
    options: PolicyLossOptions,
) -> None:
    """Adds loss and gradients of some tokens to the totals."""
    forward = _Forward.run(hidden[rows], layer, targets[rows], options)
    statistics = forward.statistics
    logprobs, entropy = statistics.logprobs, statistics.entropy
    totals.logprobs[rows] = logprobs
    totals.entropy[rows] = entropy
    with torch.enable_grad():
        loss, grad_logprobs, grad_entropy = options.token_loss(logprobs, entropy, rows)
    _validate_token_loss(loss, grad_logprobs, grad_entropy, len(rows))
    totals.loss += loss.detach()
    if totals.grad_hidden is None and totals.grad_weight is None and totals.grad_bias is None:
        return
    grad_rows = GradRows(
        hidden=forward.hidden,
        targets=targets[rows],
        maximum=statistics.maximum,
        log_sum=statistics.log_sum,
        logprobs=logprobs,
        entropy=entropy,
        grad_logprobs=grad_logprobs.detach().to(logprobs.dtype),
        grad_entropy=None if grad_entropy is None else grad_entropy.detach().to(entropy.dtype),
    )
    grad_rows, scale = scale_into_range(grad_rows, layer.transform)
    grad_chunk = None
    if totals.grad_hidden is not None:
        grad_chunk = torch.zeros_like(forward.hidden, dtype=totals.grad_hidden.dtype)
    for start, stop, chunk, products in forward.stored(layer, options.engine):
        grad = options.engine.grad_of_products(products, grad_rows, chunk, forward.centre, start)
        if grad_chunk is not None:
            add_product_(grad_chunk, grad, chunk.weight)
        if totals.grad_weight is not None:
            add_product_(totals.grad_weight[start:stop], grad.T, forward.hidden, scale=scale)
        if totals.grad_bias is not None:
            part = grad.sum(0, dtype=totals.grad_bias.dtype)
            totals.grad_bias[start:stop] += part if scale is None else part / scale
    if totals.grad_hidden is not None and grad_chunk is not None:
        totals.grad_hidden[rows] = grad_chunk if scale is None else grad_chunk / scale


@dataclass(slots=True)
class _Forward:
    """Statistics of some tokens, and the logits that were kept."""

    hidden: Tensor
    centre: Tensor | None
    statistics: RowStatistics
    kept: list[Tensor]

    @classmethod
    def run(
        cls, hidden: Tensor, layer: OutputLayer, targets: Tensor, options: PolicyLossOptions
    ) -> _Forward:
        engine = options.engine
        dtype = engine.product_dtype(hidden, layer.weight)
        hidden = hidden.to(dtype)
        wanted = target_products(hidden, layer.weight, targets)
        centre = wanted.to(torch.bfloat16) if engine.is_centred else None
        statistics = RowStatistics.empty(len(hidden), hidden, wanted.dtype)
        kept: list[Tensor] = []
        num_bytes = 0
        for start, _, chunk in chunks(layer, engine.chunk_columns, dtype):
            products = engine.products(hidden, chunk, centre)
            part = engine.fold(products, chunk, centre, targets, start, needs_entropy=True)
            statistics = statistics.merge(part)
            num_bytes += products.nbytes
            if num_bytes <= options.logits_budget_bytes:
                kept.append(products)
        exact = finish_target_logits(wanted, layer, targets)
        return cls(hidden, centre, replace(statistics, target_logits=exact), kept)

    def stored(
        self, layer: OutputLayer, engine: ProductEngine
    ) -> Iterator[tuple[int, int, OutputLayer, Tensor]]:
        """(first column, end, chunk, its products), kept or computed again; frees as it goes."""
        dtype = self.hidden.dtype
        self.kept.reverse()
        for start, stop, chunk in chunks(layer, engine.chunk_columns, dtype):
            if self.kept:
                products = self.kept.pop()
            else:
                products = engine.products(self.hidden, chunk, self.centre)
            yield start, stop, chunk, products


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
