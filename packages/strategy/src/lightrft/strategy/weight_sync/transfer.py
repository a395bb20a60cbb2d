"""Moves weights into an engine, bucket by bucket, or lets the engine share their storage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from lightrft.engines.base import RolloutEngine
from lightrft.kernels import (
    BucketBroadcaster,
    BucketLayout,
    WeightPiece,
    combine_hashes,
    hash_tensors,
)
from lightrft.strategy.distributed.collectives import transfer_device
from lightrft.strategy.weight_sync.accounting import PlannedParameter, WeightSyncError
from lightrft.strategy.weight_sync.parameter_source import AddLocal, ParameterSource

T = TypeVar("T")


@dataclass(slots=True)
class Transfer:
    """Bytes that one update wrote into an engine, and the first failure on this rank.

    Args:
        num_bytes, num_buckets, num_payload_collectives: What was moved.
        is_aliased: Whether the engine shares the trainer's storage instead.
        handed_hashes: Hash of each parameter that cannot be read back, as it was handed over.
        error: The first failure; kept until all ranks can learn of it, because the others wait for
            this rank in the next collective.
    """

    num_bytes: int = 0
    num_buckets: int = 0
    num_payload_collectives: int = 0
    is_aliased: bool = False
    handed_hashes: dict[str, int] = field(default_factory=dict)
    error: WeightSyncError | None = None

    def attempt(self, step: Callable[[], T], *, even_after_error: bool = False) -> T | None:
        """Runs one step of an update or of its verification unless an earlier one failed.

        Returns:
            What the step returned; None if it failed or did not run.
        """
        if self.error is not None and not even_after_error:
            return None
        try:
            return step()
        except WeightSyncError as err:
            self.error = self.error or err
        except Exception as err:  # noqa: BLE001 - raised on all ranks by `agree`
            if self.error is None:
                self.error = WeightSyncError("transfer", f"{type(err).__name__}: {err}")
                self.error.__cause__ = err
        return None

    def note_handed_over(self, pieces: Sequence[WeightPiece]) -> None:
        """Adds the hashes of pieces of parameters that cannot be read back."""
        hashes = hash_tensors([p.tensor for p in pieces], starts=[p.start for p in pieces])
        for piece, value in zip(pieces, hashes, strict=True):
            known = self.handed_hashes.get(piece.name, 0)
            self.handed_hashes[piece.name] = combine_hashes((known, value))


def full_shards(pairs: Sequence[PlannedParameter]) -> dict[str, Tensor]:
    """Engine name -> the trainer's own full tensor; only for sources that are not sharded."""
    return {pair.name: pair.source.local_shard.view(pair.source.shape) for pair in pairs}


def share_weights(
    engine: RolloutEngine, pairs: Sequence[PlannedParameter], source: ParameterSource
) -> bool:
    """Lets the engine use the trainer's tensors themselves, if both sides can.

    Returns:
        Whether it does; if not, nothing has changed.
    """
    fits = source.add_local is None and all(
        pair.source.is_aliasable and pair.source.local_shard.dtype == pair.target.dtype
        for pair in pairs
    )
    return fits and engine.alias_weights(full_shards(pairs))


def load_buckets(
    engine: RolloutEngine,
    layout: BucketLayout,
    pairs: Mapping[str, PlannedParameter],
    source: ParameterSource,
    transfer: Transfer,
) -> None:
    """Gathers every bucket and hands its pieces to the engine.

    After a failure the remaining buckets are still gathered: every rank takes part in every
    collective.

    Args:
        engine: An engine with an open update.
        layout: The plan for these parameters.
        pairs: Engine name -> parameter; those of the layout.
        source: Where the shards come from.
        transfer: Receives counts, hashes and the first failure.
    """
    shards = [pair.source.local_shard for pair in pairs.values()]
    # Made anew for every sync: between syncs the trainer needs the memory of its buffers.
    broadcaster = BucketBroadcaster(layout, source.group, device=_device_of(shards, source))
    filled = broadcaster.gather(
        lambda name: pairs[name].source.local_shard, add_local=_add_local(pairs, source)
    )
    for pieces in filled:
        transfer.note_handed_over([p for p in pieces if not pairs[p.name].target.verifiable])
        transfer.attempt(lambda pieces=pieces: engine.load_weights(pieces))  # type: ignore[misc]
    transfer.num_bytes = layout.num_bytes
    transfer.num_buckets = len(layout.buckets)
    transfer.num_payload_collectives = broadcaster.num_payload_collectives


def _device_of(shards: Sequence[Tensor], source: ParameterSource) -> torch.device:
    """Buckets lie where the group can move them, else with the weights."""
    if source.group is not None:
        return transfer_device(source.group)
    return shards[0].device if shards else torch.device("cpu")


def _add_local(pairs: Mapping[str, PlannedParameter], source: ParameterSource) -> AddLocal | None:
    """The source's `add_local` under engine names, which differ for a tied parameter."""
    add_local = source.add_local
    if add_local is None:
        return None

    def add(name: str, start: int, values: Tensor) -> None:
        add_local(pairs[name].source.checkpoint_name, start, values)

    return add
