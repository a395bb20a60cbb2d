"""Check of recorded experts: they are those that the trainer's routers choose, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.engines.hf.routers import Router, RoutesError
from lightrft.experience.maker import run_policy, score_policy
from lightrft.models import Actor
from lightrft.records.batch import RolloutBatch, select_rollouts, without_routes
from lightrft.strategy.backend import inner_module

if TYPE_CHECKING:
    from lightrft.config import StreamingOptions
    from lightrft.stages.metrics import StepMetrics
    from lightrft.strategy.distributed.context import DistributedContext

# Share of choices that rounding may decide otherwise, in float32 and below. Published runs in
# bfloat16 report about a tenth.
MAX_SHARES = {torch.float32: 0.02, torch.float64: 0.02}
MAX_ROUNDED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """Number of choices that were compared, and of those that differ by the name of the layer."""

    num_compared: int
    others: dict[str, int]

    @property
    def num_other(self) -> int:
        """Choices of other experts than the recorded ones."""
        return sum(self.others.values())


@torch.no_grad()
def compare_routes(
    batch: RolloutBatch, actor: nn.Module, slices: Sequence[slice], context: DistributedContext
) -> RouteCounts:
    """Count where the actor's routers would choose other experts than recorded; collective."""
    num_compared, others = 0, dict[str, int]()
    for rows in slices:
        run_policy(actor, select_rollouts(batch, rows), entropy="none", support=None)
        for router in _routers(actor):
            compared, other = _differences(router)
            num_compared += compared
            others[router.name] = others.get(router.name, 0) + other
    parts: list[tuple[int, dict[str, int]]] = context.gather_objects((num_compared, others))
    names = dict.fromkeys(name for _, each in parts for name in each)
    totals = {name: sum(each.get(name, 0) for _, each in parts) for name in names}
    return RouteCounts(sum(count for count, _ in parts), totals)


def require_like_routes(counts: RouteCounts, dtype: torch.dtype) -> None:
    """Raise a RoutesError if more choices differ than rounding explains.

    Args:
        counts: Choices of tokens that the actor's present weights sampled.
        dtype: Dtype in which trainer and engine compute.
    """
    limit = MAX_SHARES.get(dtype, MAX_ROUNDED_SHARE)
    if counts.num_other <= limit * counts.num_compared:
        return
    share, worst = counts.num_other / counts.num_compared, max(counts.others.values())
    name = next(name for name, count in counts.others.items() if count == worst)
    raise RoutesError(
        f"the experts that the engine recorded are others than the trainer's routers choose, in "
        f"{share:.1%} of {counts.num_compared} choices, expected at most {limit:.0%}; most differ "
        f"in {name} ({worst}): they belong to other rows, tokens, layers or weights. Report this "
        "with the engine's version; --routing_replay off trains without them"
    )


@torch.no_grad()
def unreplayed_logprobs(batch: RolloutBatch, actor: nn.Module, slices: Sequence[slice]) -> Tensor:
    """Return the actor's logprobs with experts that it chooses: [batch, seq]."""
    plain = without_routes(batch)
    return score_policy(actor, plain, slices=slices, entropy="none").sampling_logprobs


def check_routes(
    batch: RolloutBatch,
    actor: nn.Module,
    slices: Sequence[slice],
    context: DistributedContext,
    metrics: StepMetrics,
    config: StreamingOptions,
) -> None:
    """Compare recorded experts with the actor's choices; collective.

    Args:
        batch, actor, slices, context: See `compare_routes`.
        metrics: Gets what replaying changes.
        config: Options; `keeps_rows` says that earlier weights sampled some rows.

    Raises:
        RoutesError: They are others than rounding explains.
    """
    counts = compare_routes(batch, actor, slices, context)
    metrics.add_mean("routes_other_share", counts.num_other, counts.num_compared)
    if not config.keeps_rows:
        require_like_routes(counts, context.compute_dtype)
    if batch.compared_mask is not None:
        logprobs = unreplayed_logprobs(batch, actor, slices)
        difference, mask = logprobs.double() - batch.rollout_logprobs.double(), batch.compared_mask
        metrics.add_masked_mean("unreplayed_logprob_diff_mean", difference.abs(), mask)
        metrics.add_masked_mean("unreplayed_correction_weight", difference.exp(), mask)


def _routers(actor: nn.Module) -> Sequence[Router]:
    inner = inner_module(actor)
    return inner.routers if isinstance(inner, Actor) else ()


def _differences(router: Router) -> tuple[int, int]:
    """Return how many recorded choices of the last pass there are, and how many differ."""
    if router.replayed is None or router.natural is None:
        return 0, 0
    is_recorded = (router.replayed >= 0).all(dim=1)
    recorded, natural = (
        each[is_recorded].sort(dim=1).values for each in (router.replayed, router.natural)
    )
    return len(recorded), int((recorded != natural).any(dim=1).sum())
