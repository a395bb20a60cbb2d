"""Check of an engine's sampler: the ids that it recorded as kept are those that truncation keeps.

The trainer computes its logits of the sampled tokens and truncates them itself. Near the border
rounding decides, so a recorded set may lie anywhere between the ids that are kept whatever the
rounding and those that may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.experience.maker import run_policy
from lightrft.models.support import BLOCK_LOGITS, SamplingSupport
from lightrft.models.types import HeadReader, Projected
from lightrft.records.batch import RolloutBatch, select_rollouts
from lightrft.stages.parity_limits import ParityError

if TYPE_CHECKING:
    from lightrft.stages.metrics import StepMetrics
    from lightrft.strategy.distributed.context import DistributedContext

# Share of tokens whose sets may be others: single unlikely tokens differ more than the rest.
MAX_SHARE = 0.01
# Rounding of a logit, in units of the mean difference of logprobs that the parity gate allows.
ROUNDING = 10.0


@dataclass(slots=True)
class _Tally:
    num_compared: int = 0
    num_other: int = 0
    first: str = ""


@torch.no_grad()
def check_supports(
    batch: RolloutBatch,
    actor: nn.Module,
    slices: Sequence[slice],
    mean_limit: float,
    context: DistributedContext,
    metrics: StepMetrics,
) -> None:
    """Compare recorded with computed kept ids; collective.

    Args:
        batch: This rank's rows, sampled by the actor's present weights where `compared_mask` says.
        actor: Actor as the strategy wrapped it.
        slices: Rows of each forward pass.
        mean_limit: Mean difference of logprobs that rounding explains.
        context: Process groups of the ranks.
        metrics: Gets the share of tokens whose sets differ.

    Raises:
        ParityError: More sets differ than rounding explains; raised on all ranks.
    """
    tally = _Tally()
    for rows in slices:
        micro = select_rollouts(batch, rows)
        read = partial(_count, micro=micro, tally=tally, rounding=ROUNDING * mean_limit)
        run_policy(actor, micro, entropy="none", support=None, token_loss=HeadReader(read))
    tallies: list[_Tally] = context.gather_objects(tally)
    compared, other = (
        sum(each) for each in zip(*((t.num_compared, t.num_other) for t in tallies), strict=True)
    )
    if other > MAX_SHARE * compared:
        raise ParityError(
            f"the ids that the engine recorded as kept are others than top_p, top_k and min_p keep "
            f"of the trainer's logits, for {other} of {compared} tokens, beyond rounding of "
            f"{ROUNDING * mean_limit:g}\n  first: {next(t.first for t in tallies if t.first)}\n"
            "  the engine samples from another distribution, or records another; report this with "
            "the engine's version"
        )
    metrics.add_mean("kept_ids_other_share", other, compared)


def _count(projected: Projected, micro: RolloutBatch, tally: _Tally, rounding: float) -> Tensor:
    support, rows, columns = micro.support, projected.rows, projected.columns
    assert support is not None
    assert rows is not None
    assert columns is not None
    placed = support.of_rows(micro.facts).of_tokens(rows, columns).kept
    if placed is None:
        return projected.hidden.new_zeros(())
    is_read = placed.is_recorded
    if micro.compared_mask is not None:
        is_read = is_read & micro.compared_mask[rows, columns]
    chosen = is_read.nonzero().squeeze(1)
    size = max(1, BLOCK_LOGITS // len(projected.layer.weight))
    for places in torch.split(chosen, size):
        kept = replace(placed, starts=placed.starts[places], sizes=placed.sizes[places])
        logits = projected.at(places).logits(slice(None))
        is_kept = torch.zeros_like(logits, dtype=torch.bool)
        is_kept[kept.flat()] = True
        surely, maybe = kept_bounds(logits, support, rounding)
        missing, extra = surely & ~is_kept, is_kept & ~maybe
        is_other = (missing | extra).any(dim=1)
        tally.num_compared += len(places)
        tally.num_other += int(is_other.sum())
        if not tally.first and is_other.any():
            token = int(is_other.nonzero()[0])
            place = places[token]
            tally.first = (
                f"sample {int(micro.sample_ids[rows[place]])}, token {int(columns[place])} of the "
                f"row: without {missing[token].nonzero().flatten().tolist()[:8]}, with "
                f"{extra[token].nonzero().flatten().tolist()[:8]} too many"
            )
    return projected.hidden.new_zeros(())


def kept_bounds(logits: Tensor, support: SamplingSupport, rounding: float) -> tuple[Tensor, Tensor]:
    """Return the ids that are kept if any logits change by `rounding`, and those that may be.

    Args:
        logits: [rows, vocab] float32 or float64, temperature included.
        support: Truncation of the draw.
        rounding: Largest change of the difference of two logits.

    Returns:
        [rows, vocab] bool each; the first is part of the second.
    """
    surely = maybe = logits > -torch.inf
    min_p_next = support.min_p_first
    for _ in range(2):
        if min_p_next and support.min_p > 0:
            border = logits.amax(dim=1, keepdim=True) + torch.tensor(support.min_p).log()
            surely, maybe = (
                surely & (logits > border + rounding),
                maybe & (logits >= border - rounding),
            )
        if not min_p_next:
            surely, maybe = _after_top_k(logits, support.top_k, rounding, surely, maybe)
            surely, maybe = _after_top_p(logits, support.top_p, rounding, surely, maybe)
        min_p_next = not min_p_next
    # The most likely token is always kept, but rounding may decide which one it is.
    return surely, maybe | (logits >= logits.amax(dim=1, keepdim=True) - rounding)


def _after_top_k(
    logits: Tensor, top_k: int, rounding: float, surely: Tensor, maybe: Tensor
) -> tuple[Tensor, Tensor]:
    if not 0 < top_k < logits.shape[1]:
        return surely, maybe
    best = logits.topk(top_k + 1, dim=1).values
    return surely & (logits > best[:, -1:] + rounding), maybe & (
        logits >= best[:, -2:-1] - rounding
    )


def _after_top_p(
    logits: Tensor, top_p: float, rounding: float, surely: Tensor, maybe: Tensor
) -> tuple[Tensor, Tensor]:
    if top_p >= 1:
        return surely, maybe
    weights = (logits - logits.amax(dim=1, keepdim=True)).double().exp()

    def share_above(among: Tensor, total: Tensor, shift: float) -> Tensor:
        """Return the share of the tokens whose logits exceed each one's by more than `shift`."""
        ordered, order = logits.sort(dim=1, descending=True)
        counted = (weights * among).gather(1, order).cumsum(dim=1)
        counted = torch.nn.functional.pad(counted, (1, 0))
        num_above = torch.searchsorted(-ordered, -(logits + shift).contiguous())
        return counted.gather(1, num_above) / (weights * total).sum(dim=1, keepdim=True)

    factor = 1 + 2 * rounding
    most = share_above(maybe, surely, -rounding) - weights * maybe / (weights * surely).sum(
        dim=1, keepdim=True
    )
    least = share_above(surely, maybe, rounding)
    return surely & (most * factor < top_p), maybe & (least < top_p * factor)
