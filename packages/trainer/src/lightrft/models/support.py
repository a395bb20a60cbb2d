"""Tokens that a truncated distribution could have drawn: recorded by the engine, or computed again.

An engine that samples with top_k, top_p or min_p reports logprobs of the distribution renormalised
over the kept tokens. With the mass m of the kept tokens under the whole distribution,
log p_truncated = log p - log m for every kept token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lightrft.engines.sampling import keep_support
from lightrft.kernels.logprob.passes import wide_product
from lightrft.kernels.logprob.types import OutputLayer, apply_transform

# 16 MiB of logits: sorting them takes about ten times as much.
BLOCK_LOGITS = 2**22
# Elements of the rows of weights that are gathered at a time.
GATHERED = 2**24


@dataclass(frozen=True, slots=True)
class KeptSets:
    """Recorded ids that truncation kept for tokens.

    Args:
        ids: [n] int32, in which the ids of a token are consecutive.
        starts, sizes: Place and number of each token's ids, [tokens] int64; 0 ids were not
            recorded.
        is_complete: Whether the ids of all tokens were recorded.
    """

    ids: Tensor
    starts: Tensor
    sizes: Tensor
    is_complete: bool

    @property
    def is_recorded(self) -> Tensor:
        """[tokens] bool; the ids were recorded."""
        return self.sizes > 0

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return the token of each kept id, ascending, and the ids: [kept] int64 each."""
        owners = torch.arange(len(self.sizes), device=self.sizes.device).repeat_interleave(
            self.sizes
        )
        firsts = self.sizes.cumsum(0) - self.sizes
        within = torch.arange(len(owners), device=owners.device) - firsts[owners]
        return owners, self.ids[self.starts[owners] + within].long()


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """Truncation before a token is drawn: top_k, then top_p of what is left, then min_p.

    Args:
        top_k: Keep the k most likely tokens; -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: Keep tokens with at least this share of the top token's probability; 0 keeps all.
        min_p_first: Whether min_p acts before both others.
        renormalises: Whether logprobs are those of the kept tokens alone, where recorded.
        computes: Whether the mass of tokens without a record is computed.
        kept: Recorded ids; in a batch with [batch, seq] places; None without any.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    min_p_first: bool = False
    renormalises: bool = False
    computes: bool = True
    kept: KeptSets | None = field(default=None, compare=False)

    @property
    def suffices(self) -> bool:
        """True if logprobs over the recorded ids are all that is needed."""
        return self.renormalises and self.kept is not None and self.kept.is_complete

    @property
    def of_logprobs(self) -> SamplingSupport | None:
        """Support for other models, whose logprobs are compared with the policy's; None without."""
        is_needed = self.renormalises and self.kept is not None
        return replace(self, computes=False) if is_needed else None

    def of_rows(self, facts: Mapping[str, Tensor]) -> SamplingSupport:
        """Return the support of some rows, whose facts tell their places."""
        if self.kept is None:
            return self
        return replace(self, kept=_at(self.kept, facts["kept_starts"], facts["kept_sizes"]))

    def of_tokens(self, rows: Tensor, columns: Tensor) -> SamplingSupport:
        """Return the support of some tokens of the batch."""
        if self.kept is None:
            return self
        starts, sizes = (each[rows, columns] for each in (self.kept.starts, self.kept.sizes))
        return replace(self, kept=_at(self.kept, starts, sizes))

    def joined(
        self, logprobs: Tensor, renormalised: Tensor, mass: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logprobs of tokens, and their log kept mass under these.

        Args:
            logprobs: [tokens] over the whole vocabulary.
            renormalised: [tokens] over the recorded ids, where there are some.
            mass: [tokens] computed log kept mass; None if it was not.
        """
        assert self.kept is not None
        is_recorded = self.kept.is_recorded
        if self.renormalises:
            left = None if mass is None else mass.masked_fill(is_recorded, 0.0)
            return torch.where(is_recorded, renormalised, logprobs), left
        recorded = (logprobs - renormalised).detach().clamp_(max=0)
        other = torch.zeros_like(recorded) if mass is None else mass
        return logprobs, torch.where(is_recorded, recorded, other)


def _at(kept: KeptSets, starts: Tensor, sizes: Tensor) -> KeptSets:
    return replace(kept, starts=starts, sizes=sizes)


def kept_logprobs(hidden: Tensor, layer: OutputLayer, targets: Tensor, kept: KeptSets) -> Tensor:
    """Return log-probabilities renormalised over the recorded ids of each token.

    log p_S(y) = x_y - log sum_{v in S} exp(x_v); the gradient is 0 outside of S. Only the rows of
    the weight that were kept are read.

    Args:
        hidden: [tokens, hidden].
        layer: Output layer and the distribution of its logits.
        targets: [tokens] int64, the drawn tokens.
        kept: Recorded ids of the tokens.

    Returns:
        [tokens] float32 (float64 for float64 inputs); 0 for tokens without a record.
    """
    owners, ids = kept.flat()
    if not len(ids):  # nothing to reduce, but a graph
        return hidden.sum(dim=-1).to(torch.promote_types(hidden.dtype, torch.float32)) * 0
    products = _PairProducts.apply(hidden, layer.weight, owners, ids)  # type: ignore[no-untyped-call, unused-ignore]
    bias = None if layer.bias is None else layer.bias[ids].to(products.dtype)
    logits = apply_transform(products, bias, layer.transform)
    sizes = kept.sizes
    largest = torch.segment_reduce(logits.detach(), "max", lengths=sizes)
    largest = torch.where(kept.is_recorded, largest, 0.0)
    sums = torch.segment_reduce((logits - largest[owners]).exp(), "sum", lengths=sizes, initial=0)
    # The drawn token is among the ids once, as `collate` checked.
    drawn = logits.masked_fill(ids != targets[owners], 0.0)
    chosen = torch.segment_reduce(drawn, "sum", lengths=sizes, initial=0)
    total = torch.where(kept.is_recorded, sums, 1.0)
    return torch.where(kept.is_recorded, chosen - largest - total.log(), 0.0)


class _PairProducts(torch.autograd.Function):
    """Products of hidden states with some rows of the weight; sums have a fixed order."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, owners: Tensor, ids: Tensor
    ) -> Tensor:
        """Return hidden[owners] * weight[ids], summed over the hidden size: [pairs] float32."""
        ctx.save_for_backward(hidden, weight, owners, ids)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        products = hidden.new_empty(len(ids), dtype=wide)
        for part in _parts(len(ids), hidden.shape[1]):
            pair = hidden[owners[part]].to(wide) * weight[ids[part]].to(wide)
            products[part] = pair.sum(dim=-1)
        return products

    @staticmethod
    def backward(ctx: FunctionCtx, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of states and weight."""
        hidden, weight, owners, ids = ctx.saved_tensors  # type: ignore[attr-defined]
        (slope,) = slopes
        of_hidden = torch.zeros_like(hidden, dtype=slope.dtype)
        of_weight = torch.zeros_like(weight, dtype=slope.dtype)
        order = ids.argsort(stable=True)
        for part in _parts(len(ids), hidden.shape[1]):
            values = weight[ids[part]].to(slope.dtype) * slope[part, None]
            _add_sorted(of_hidden, owners[part], values)
            place = order[part]
            values = hidden[owners[place]].to(slope.dtype) * slope[place, None]
            _add_sorted(of_weight, ids[place], values)
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None, None


def _parts(count: int, width: int) -> list[slice]:
    size = max(1, GATHERED // width)
    return [slice(start, start + size) for start in range(0, count, size)]


def _add_sorted(total: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values to rows of the total whose places ascend; each row is written once."""
    rows, counts = torch.unique_consecutive(places, return_counts=True)
    total[rows] += torch.segment_reduce(values, "sum", lengths=counts, axis=0)


def log_kept_mass(logits: Tensor, targets: Tensor, support: SamplingSupport) -> Tensor:
    """Return the log-probability that a draw from the whole distribution is kept; at most 0.

    The target counts as kept: it was drawn, and rounding may put it on either side of the border.

    Args:
        logits: [rows, vocab] float32 or float64, temperature included.
        targets: [rows] int64, the drawn tokens.
        support: Truncation of the draw.

    Returns:
        [rows] in the dtype of the logits.
    """
    index = targets[:, None]
    kept = keep_support(
        logits,
        top_k=support.top_k,
        top_p=support.top_p,
        min_p=support.min_p,
        min_p_first=support.min_p_first,
    )
    kept = kept.scatter(-1, index, logits.gather(-1, index))
    return (kept.logsumexp(dim=-1) - logits.logsumexp(dim=-1)).clamp_(max=0)


@torch.no_grad()
def replay_support(
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    support: SamplingSupport,
    *,
    chunk_size: int,
    block_logits: int = BLOCK_LOGITS,
) -> Tensor:
    """Return `log_kept_mass` of hidden states, a block of rows at a time; without graph.

    Args:
        hidden: [tokens, hidden].
        layer: Output layer and the distribution of its logits.
        targets: [tokens] int64, the drawn tokens.
        support: Truncation of the draw.
        chunk_size: Rows of the weight that are widened at a time.
        block_logits: Most logits of one block; a block has at least one row.

    Returns:
        [tokens] float32 (float64 for float64 inputs).
    """
    rows = max(1, block_logits // len(layer.weight))
    # One block even without tokens: its empty result then has the dtype of all others.
    starts = range(0, max(1, len(hidden)), rows)
    masses = [
        log_kept_mass(
            _logits(hidden[start : start + rows], layer, chunk_size),
            targets[start : start + rows],
            support,
        )
        for start in starts
    ]
    return torch.cat(masses)


def _logits(hidden: Tensor, layer: OutputLayer, chunk_size: int) -> Tensor:
    """Return [rows, vocab] float32 or float64 logits."""
    parts = []
    for start in range(0, len(layer.weight), chunk_size):
        part = slice(start, start + chunk_size)
        product = wide_product(hidden, layer.weight[part].T)
        bias = None if layer.bias is None else layer.bias[part].to(product.dtype)
        parts.append(apply_transform(product, bias, layer.transform))
    return torch.cat(parts, dim=-1)
