"""Sync of a rollout engine's weights with the trainer's, verified at every update."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightrft.engines.base import RolloutEngine
from lightrft.kernels import (
    BucketBroadcaster,
    BucketLayout,
    TensorSpec,
    hash_tensors,
)
from lightrft.kernels.weight_bucket.broadcaster import ShardSource
from lightrft.strategy.distributed.collectives import (
    Group,
    gather_objects,
    not_finite,
    transfer_device,
)
from lightrft.strategy.distributed.failure_sharing import run_without_collective
from lightrft.strategy.weight_sync.canary import Canary, check_effect
from lightrft.strategy.weight_sync.parameter_source import AddLocal, ParameterSource
from lightrft.strategy.weight_sync.verification import (
    PEER_FAILED,
    PlannedParameter,
    WeightSyncError,
    check_hashes,
    check_untouched,
    listed,
    match_parameters,
    model_hash,
    note_hashes,
    parameters_to_send,
    raise_together,
    shard_hashes,
    source_hashes,
)

T = TypeVar("T")
MEGABYTE = 2**20
# Syncs over shared storage after which the canary is scored in any case.
MAX_SYNCS_WITHOUT_CANARY = 9
# Address, strides and shape of a tensor.
Place = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """Report of one completed sync.

    Args:
        weights_version: Version that the engine now has; 0 for the first sync.
        num_bytes: Bytes written into the engine, in its dtypes; 0 if it shares the storage.
        num_buckets: Weight buckets.
        num_payload_collectives: Collectives that carried weights.
        num_resident_bytes: Bytes of frozen parameters that the engine held already.
        num_verified_bytes: Bytes whose hash is that of the engine's final storage.
        num_aliased_bytes: Part of these whose storage is also the trainer's, by their addresses:
            hashed once for both sides.
        num_unverifiable_bytes: Bytes hashed only as they were passed to the engine.
        engine_hash: `model_hash` of the engine's weights; 0 without verification.
        canary_difference: Largest difference between trainer and engine in a logprob of the
            canary prompt; None if no prompt was scored.
        seconds: Whole duration.
        verify_seconds: Part of it spent on hashes and the canary prompt.
        is_aliased: Whether the engine shares the trainer's storage of all parameters.
    """

    weights_version: int
    num_bytes: int
    num_buckets: int
    num_payload_collectives: int
    num_resident_bytes: int
    num_verified_bytes: int
    num_aliased_bytes: int
    num_unverifiable_bytes: int
    engine_hash: int
    canary_difference: float | None
    seconds: float
    verify_seconds: float
    is_aliased: bool

    def summary(self) -> str:
        """Return one line for the log."""
        moved = (
            "shared with the trainer"
            if self.is_aliased
            else f"{_megabytes(self.num_bytes)} in {self.num_buckets} buckets and "
            f"{self.num_payload_collectives} collectives, "
            f"{_megabytes(self.num_resident_bytes)} frozen and resident"
        )
        checked = "not verified"
        if self.num_verified_bytes + self.num_unverifiable_bytes > 0:
            checked = (
                f"verified {_megabytes(self.num_verified_bytes)} in final storage (of it "
                f"{_megabytes(self.num_aliased_bytes)} aliased, the same memory, hashed once) and "
                f"{_megabytes(self.num_unverifiable_bytes)} on hand-over, "
                f"hash {self.engine_hash & (2**64 - 1):016x}"
            )
        if self.canary_difference is not None:
            checked += f", canary prompt within {self.canary_difference:.1e}"
        return (
            f"weights version {self.weights_version}: {moved}; {checked}; "
            f"{self.seconds:.2f} s, of it {self.verify_seconds:.2f} s for verification"
        )


@runtime_checkable
class TakesShards(Protocol):
    """An engine in other processes, to which every rank sends the shards that it owns."""

    def load_shards(
        self,
        layout: BucketLayout,
        group: ProcessGroup | None,
        sources: ShardSource,
        *,
        add_local: AddLocal | None,
        unreadable: frozenset[str],
    ) -> dict[str, int]:
        """Load all buckets; return the hashes of unreadable parameters as they were passed."""


@dataclass(slots=True)
class Transfer:
    """Bytes that one update wrote into an engine, its checks, and the first failure on this rank.

    Args:
        num_bytes, num_buckets, num_payload_collectives: Amounts that were moved.
        num_resident_bytes: Bytes of frozen parameters that the engine held already.
        taken_names: Parameters for which the engine says that it uses the trainer's storage.
        is_aliased: Whether the engine says so of all parameters.
        handed_hashes: Hash of each parameter that cannot be read back, as it was passed.
        shared_names: Parameters whose storage is the trainer's by their addresses.
        engine_hashes, canary_difference, num_verified_bytes, num_unverifiable_bytes: Results of the
            checks; see `WeightSyncReport`.
        error: First failure; kept until all ranks can learn of it, because the others wait for this
            rank in the next collective.
    """

    num_bytes: int = 0
    num_buckets: int = 0
    num_payload_collectives: int = 0
    num_resident_bytes: int = 0
    taken_names: frozenset[str] = frozenset()
    is_aliased: bool = False
    handed_hashes: dict[str, int] = field(default_factory=dict)
    shared_names: frozenset[str] = frozenset()
    engine_hashes: Mapping[str, int] = field(default_factory=dict)
    canary_difference: float | None = None
    num_verified_bytes: int = 0
    num_unverifiable_bytes: int = 0
    error: WeightSyncError | None = None

    def attempt(self, step: Callable[[], T], *, even_after_error: bool = False) -> T | None:
        """Run one step of an update or of its verification unless an earlier one failed.

        Returns:
            Result of the step; None if it failed or did not run.
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


def full_shards(pairs: Sequence[PlannedParameter]) -> dict[str, Tensor]:
    """Return engine name -> the trainer's full tensor; only for sources without shards."""
    return {pair.name: pair.source.local_shard.view(pair.source.shape) for pair in pairs}


def share_weights(
    engine: RolloutEngine, pairs: Sequence[PlannedParameter], source: ParameterSource
) -> frozenset[str]:
    """Let the engine use the trainer's tensors themselves: all, or else the frozen ones that fit.

    Returns:
        Names of these parameters; nothing else has changed.
    """
    if source.group is not None:
        return frozenset()  # Ranks that share different parameters would plan different buckets.
    fitting = [
        pair
        for pair in pairs
        if pair.source.is_aliasable and pair.source.local_shard.dtype == pair.target.dtype
    ]
    if len(fitting) < len(pairs):
        fitting = [pair for pair in fitting if pair.source.frozen]
    names = frozenset(pair.name for pair in fitting)
    if not fitting or not engine.alias_weights(full_shards(fitting)):
        return names & engine.lent_names
    return names


def load_buckets(
    engine: RolloutEngine,
    layout: BucketLayout,
    pairs: Mapping[str, PlannedParameter],
    source: ParameterSource,
    transfer: Transfer,
) -> None:
    """Gather every bucket and pass its pieces to the engine, or have it take the shards.

    After a failure the remaining buckets are still gathered: every rank takes part in every
    collective.

    Args:
        engine: An engine with an open update.
        layout: Plan for these parameters.
        pairs: Engine name -> parameter, for the layout's parameters.
        source: Source of the shards.
        transfer: Record of counts, hashes and the first failure.
    """
    transfer.num_bytes, transfer.num_buckets = layout.num_bytes, len(layout.buckets)
    unreadable = frozenset(n for n, pair in pairs.items() if not pair.target.verifiable)

    def shard_of(name: str) -> Tensor:
        return pairs[name].source.local_shard

    add_local = _add_local(pairs, source)
    if isinstance(engine, TakesShards):
        load = partial(engine.load_shards, layout, source.group, shard_of)
        handed = transfer.attempt(partial(load, add_local=add_local, unreadable=unreadable))
        transfer.handed_hashes.update(handed or {})
        transfer.num_payload_collectives = len(layout.buckets)
        return
    # Made anew for every sync: between syncs the trainer needs the memory of its buffers.
    # Where the group can move them, else where the weights are.
    device = torch.device("cpu") if source.group is None else transfer_device(source.group)
    if source.group is None and pairs:
        device = next(iter(pairs.values())).source.local_shard.device
    broadcaster = BucketBroadcaster(layout, source.group, device=device)
    for pieces in broadcaster.gather(shard_of, add_local=add_local):
        note_hashes(transfer.handed_hashes, [p for p in pieces if p.name in unreadable])
        transfer.attempt(lambda pieces=pieces: engine.load_weights(pieces))  # type: ignore[misc]
    transfer.num_payload_collectives = broadcaster.num_payload_collectives


def _add_local(pairs: Mapping[str, PlannedParameter], source: ParameterSource) -> AddLocal | None:
    """Return the source's `add_local` under engine names, which differ for a tied parameter."""
    add_local = source.add_local
    if add_local is None:
        return None

    def add(name: str, start: int, values: Tensor) -> None:
        add_local(pairs[name].source.checkpoint_name, start, values)

    return add


@dataclass(slots=True)
class SharedStorage:
    """Results of the last sync in storage that trainer and engine share.

    The canary detects tensors under wrong names, in a wrong order, or left behind by training.
    None of these can be new if every name has the tensor that it had when the canary was right,
    and every trained tensor has new values since the last sync: then the optimizer moved it, so it
    is the right tensor.
    """

    _places: dict[str, Place] = field(default_factory=dict)
    _hashes: dict[str, int] = field(default_factory=dict)
    _num_without: int = 0

    def is_known(self, pairs: Sequence[PlannedParameter], hashes: Mapping[str, int]) -> bool:
        """Return whether the canary would only repeat its last comparison."""
        if not self._places or self._num_without >= MAX_SYNCS_WITHOUT_CANARY:
            return False
        has_moved = all(
            hashes[pair.name] != self._hashes.get(pair.name)
            for pair in pairs
            if not pair.source.frozen
        )
        return has_moved and _places(pairs) == self._places

    def keep(
        self, pairs: Sequence[PlannedParameter], hashes: Mapping[str, int], *, was_scored: bool
    ) -> None:
        """Record a sync that succeeded."""
        self._places, self._hashes = _places(pairs), dict(hashes)
        self._num_without = 0 if was_scored else self._num_without + 1

    def forget(self) -> None:
        """Let the next sync score the canary."""
        self._places.clear()


class WeightSync:
    """Sync of one engine's weights with a trainer's.

    The source is read anew at every sync; only the bucket layout is kept between syncs, as long as
    manifest and shards stay the same.

    Args:
        engine: Engine to keep equal.
        bucket_bytes: Upper bound on one weight bucket.
        verify: Compare hashes, and score the canary prompt, at every sync.
        allow_alias: Let the engine share the trainer's storage if both sides can. Must be off if
            the engine generates while the trainer steps (overlap, partial rollouts).
        world: Ranks that must end every sync alike; None is all of them.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        bucket_bytes: int = 256 * MEGABYTE,
        verify: bool = True,
        allow_alias: bool = True,
        world: Group = None,
    ) -> None:
        self.engine = engine
        self.bucket_bytes = bucket_bytes
        self.verify = verify
        self.allow_alias = allow_alias
        self.world = world
        self._layout: BucketLayout | None = None
        self._owner: weakref.ref[object] | None = None
        self._sent_hashes: dict[str, int] = {}
        self._frozen: Mapping[str, int | None] = {}
        self._is_current = False
        self._shared = SharedStorage()

    def sync(
        self,
        source: ParameterSource,
        *,
        canary: Canary | None = None,
        wake_cache: Callable[[], object] | None = None,
    ) -> WeightSyncReport:
        """Make the engine's weights equal to the source's.

        All ranks must call it, and it ends in the same way on all of them.

        Args:
            source: Parameters of the trainer.
            canary: Prompt to score after the update; ignored without verification.
            wake_cache: Function to call once the weights are there, before the engine computes with
                them, on every rank and also after a failure.

        Raises:
            WeightSyncError: Nothing was sent (`check == "accounting"`), or the engine does not
                hold the trainer's weights; it then refuses to generate until a sync succeeds.
            NonFiniteError: A weight is not finite as it would be sent (only with verification).
        """
        start_time = time.perf_counter()
        previous_version = self.engine.weights_version
        pairs, rank_hashes = self._match(source)
        hashes, replica_hash = source_hashes(pairs, source, rank_hashes) if self.verify else ({}, 0)
        transfer = Transfer()
        frozen = transfer.attempt(lambda: self._frozen_hashes(pairs, hashes, source)) or {}
        verify_seconds = time.perf_counter() - start_time if self.verify else 0.0
        self._send(transfer, pairs, source)
        if wake_cache is not None:
            transfer.attempt(wake_cache, even_after_error=True)
        if self.engine.runs_on_every_rank:
            # Hashing and scoring are collectives of such an engine: no rank may stay away alone.
            transfer.attempt(
                lambda: raise_together(transfer.error, self.world), even_after_error=True
            )
        verify_start_time = time.perf_counter()
        self._verify(transfer, pairs, hashes, canary)
        self._conclude(previous_version, transfer.error, replica_hash)
        self._owner, self._frozen, self._is_current = weakref.ref(source.owner), frozen, True
        if self.verify and transfer.is_aliased and canary is not None:
            self._shared.keep(pairs, hashes, was_scored=transfer.canary_difference is not None)
        self._sent_hashes = dict(hashes)
        end_time = time.perf_counter()
        return WeightSyncReport(
            weights_version=self.engine.weights_version,
            num_bytes=transfer.num_bytes,
            num_buckets=transfer.num_buckets,
            num_payload_collectives=transfer.num_payload_collectives,
            num_resident_bytes=transfer.num_resident_bytes,
            num_verified_bytes=transfer.num_verified_bytes,
            num_aliased_bytes=_num_bytes([p for p in pairs if p.name in transfer.shared_names]),
            num_unverifiable_bytes=transfer.num_unverifiable_bytes,
            engine_hash=model_hash(transfer.engine_hashes),
            canary_difference=transfer.canary_difference,
            seconds=end_time - start_time,
            verify_seconds=verify_seconds + end_time - verify_start_time,
            is_aliased=transfer.is_aliased,
        )

    def forget(self) -> None:
        """Let the next sync take every parameter as new: the trainer has read others."""
        self._owner = None

    def check_resident(self) -> None:
        """Bar the engine if a parameter differs from the sent one.

        For an engine that slept since, and receives no weights before it generates. Each rank
        checks alone; all learn the result when they generate.
        """
        sent = self._sent_hashes if self.verify else {}
        if self.engine.weights_were_dropped or not sent:
            return
        verifiable = {p.name for p in self.engine.parameter_manifest() if p.verifiable}
        expected = {name: value for name, value in sent.items() if name in verifiable}
        try:
            check_hashes(expected, self.engine.hash_parameters(list(expected)))
        except RuntimeError as error:  # also if the engine holds something else now
            self.engine.mark_stale(f"weights changed while it slept: {error}")

    def _verify(
        self,
        transfer: Transfer,
        pairs: Sequence[PlannedParameter],
        hashes: Mapping[str, int],
        canary: Canary | None,
    ) -> None:
        """Compare hashes and score the canary; results and failures go to `transfer`."""
        if not self.verify:
            return
        if transfer.taken_names:
            taken = [pair for pair in pairs if pair.name in transfer.taken_names]
            find_shared = partial(self.engine.shared_names, full_shards(taken))
            transfer.shared_names = transfer.attempt(find_shared) or frozenset()
        compare = partial(self._compare_hashes, transfer, pairs, hashes)
        transfer.engine_hashes = transfer.attempt(lambda: self._inside(compare)) or {}
        if canary is not None and self._is_due(canary, transfer, pairs, hashes):
            transfer.canary_difference = self._score_canary(canary, transfer)
        transfer.num_verified_bytes = _num_bytes([p for p in pairs if p.target.verifiable])
        transfer.num_unverifiable_bytes = _num_bytes(pairs) - transfer.num_verified_bytes

    def _is_due(
        self,
        canary: Canary,
        transfer: Transfer,
        pairs: Sequence[PlannedParameter],
        hashes: Mapping[str, int],
    ) -> bool:
        """Return whether the prompt is scored; all ranks agree, as the forward is collective."""
        if not self.engine.computes_model:
            return False
        is_known = transfer.is_aliased and self._shared.is_known(pairs, hashes)
        return any(gather_objects(not is_known or canary.media is not None, self.world))

    def _match(self, source: ParameterSource) -> tuple[tuple[PlannedParameter, ...], Sequence[int]]:
        """Account for every parameter; all ranks fail together, before anything is sent.

        Returns:
            Parameters, and with verification the hashes of this rank's shards of them.
        """
        transfer = Transfer()

        def match() -> tuple[tuple[PlannedParameter, ...], Sequence[int]]:
            manifest = self.engine.parameter_manifest()
            pairs = match_parameters(manifest, source.parameters(), source.tied_names)
            if not self.verify:
                return pairs, ()
            hashes, overflowing = shard_hashes(pairs, source)
            if overflowing:
                raise WeightSyncError("finite", listed(overflowing), overflowing)
            return pairs, hashes

        matched = transfer.attempt(match)
        try:
            raise_together(transfer.error, self.world)
        except WeightSyncError as error:
            if error.check == "finite":
                raise not_finite(error.names, what="weights are") from error
            raise
        return matched or ((), ())

    def _frozen_hashes(
        self,
        pairs: Sequence[PlannedParameter],
        hashes: Mapping[str, int],
        source: ParameterSource,
    ) -> dict[str, int | None]:
        """Return the hashes of what is frozen; of what adapters change, those of this rank.

        Raises:
            WeightSyncError: One differs from that of the last sync with this owner.
        """
        if self._owner is None or self._owner() is not source.owner:
            self._frozen = {}
        frozen = {pair.name: hashes.get(pair.name) for pair in pairs if pair.source.frozen}
        if self.verify:
            values = hash_tensors([entry.local_shard for entry in source.changed_base])
            names = (entry.checkpoint_name for entry in source.changed_base)
            frozen.update(zip(names, values, strict=True))
        check_untouched(frozen, self._frozen)
        return frozen

    def _select(self, pairs: Sequence[PlannedParameter]) -> tuple[PlannedParameter, ...]:
        """Return the parameters to write now: all but frozen ones that the engine holds already."""
        if self.engine.keeps_base:  # compared, like all others, and never written
            return tuple(pair for pair in pairs if not pair.source.frozen)
        if self.engine.weights_were_dropped or not self._is_current:
            return tuple(pairs)
        # A parameter that was trained until now may have changed.
        resident = {p.name for p in pairs if p.source.frozen and p.name in self._frozen}
        return parameters_to_send(pairs, frozenset(resident))

    def _send(
        self,
        transfer: Transfer,
        pairs: Sequence[PlannedParameter],
        source: ParameterSource,
    ) -> None:
        sent = self._select(pairs)
        # If this update fails, nothing counts as resident at the next one.
        self._is_current = False
        if self.allow_alias:
            transfer.taken_names = share_weights(self.engine, pairs, source)
            transfer.is_aliased = len(transfer.taken_names) == len(pairs)
        moved = {pair.name for pair in sent} | transfer.taken_names
        transfer.num_resident_bytes = _num_bytes([p for p in pairs if p.name not in moved])
        if not transfer.is_aliased:
            rest = [pair for pair in sent if pair.name not in transfer.taken_names]
            transfer.attempt(self.engine.begin_weight_update)
            by_name = {pair.name: pair for pair in rest}
            load_buckets(self.engine, self._plan(rest), by_name, source, transfer)
            transfer.attempt(self.engine.finish_weight_update, even_after_error=True)
        transfer.attempt(self.engine.reset_caches, even_after_error=True)

    def _plan(self, sent: Sequence[PlannedParameter]) -> BucketLayout:
        specs = tuple(
            TensorSpec(pair.name, pair.target.shape, pair.target.dtype, pair.source.shards)
            for pair in sent
        )
        if self._layout is None or self._layout.specs != specs:
            self._layout = BucketLayout.plan(specs, bucket_bytes=self.bucket_bytes)
        return self._layout

    def _compare_hashes(
        self, transfer: Transfer, pairs: Sequence[PlannedParameter], hashes: Mapping[str, int]
    ) -> dict[str, int]:
        """Check the engine's weights, as far as it can show them; else those that it was sent.

        Args:
            transfer: Transfer, with what is shared and what cannot be read back.
            pairs: All parameters.
            hashes: Hashes of the trainer's parameters.

        Returns:
            Hashes of the engine's parameters.
        """
        shared = transfer.shared_names
        readable = [p.name for p in pairs if p.target.verifiable and p.name not in shared]
        engine_hashes = self.engine.hash_parameters(readable)
        engine_hashes.update((name, hashes[name]) for name in shared)
        for pair in pairs:
            if not pair.target.verifiable and pair.name not in shared:
                # A resident one was checked when it was passed; a base that the engine read by
                # itself and cannot show is left to the canary.
                resident_hash = self._sent_hashes.get(pair.name, hashes[pair.name])
                engine_hashes[pair.name] = transfer.handed_hashes.get(pair.name, resident_hash)
        check_hashes(hashes, engine_hashes)
        return engine_hashes

    def _inside(self, step: Callable[[], T]) -> T:
        """Run a step that may be a collective of the engine; no rank is left alone in it.

        Raises:
            WeightSyncError: Another rank failed. A rank that fails raises its original error.
        """
        if not self.engine.runs_on_every_rank:
            return step()
        results: list[T] = []
        try:
            run_without_collective(
                lambda: results.append(step()), self.world, what="the weight sync failed"
            )
        except RuntimeError as failure:
            if results:
                raise WeightSyncError(PEER_FAILED, str(failure)) from failure
            raise
        return results[0]

    def _score_canary(self, canary: Canary, transfer: Transfer) -> float | None:
        """Let engine and trainer score the prompt; every rank runs the trainer's forward."""

        def ask() -> tuple[tuple[int, ...], list[float]]:
            # The engine computes nothing with weights that have no version. `_conclude` revokes it
            # if any rank detects a fault.
            self.engine.set_weights_version(self.engine.weights_version + 1)
            return canary.ask(self.engine)

        filler = (*canary.token_ids, canary.token_ids[0])
        token_ids, logprobs = transfer.attempt(lambda: self._inside(ask)) or (filler, None)
        expected = canary.score(token_ids, None)
        base = None if canary.score_base is None else canary.score_base(token_ids)
        difference = self._score_media(canary, transfer)
        if logprobs is None:
            return None
        text_difference = transfer.attempt(lambda: canary.check(expected, logprobs))
        if base is not None:
            transfer.attempt(lambda: check_effect(canary.limits, expected, base, logprobs))
        return max((d for d in (text_difference, difference) if d is not None), default=None)

    def _score_media(self, canary: Canary, transfer: Transfer) -> float | None:
        """Compare the engine's logprobs of media with the trainer's; None without media."""
        media = canary.media
        if media is None:
            return None
        ask = partial(canary.ask_about_media, self.engine, media)
        answer = transfer.attempt(lambda: self._inside(ask))
        tokens = (media.token_ids[-1],) if answer is None else answer.output_token_ids
        expected = canary.score((*media.token_ids, *tokens), media)[-len(tokens) :]
        if answer is None:
            return None
        what = "a prompt with images or videos"
        return transfer.attempt(lambda: canary.check(expected, answer.output_logprobs, what=what))

    def _conclude(
        self, previous_version: int, error: WeightSyncError | None, replica_hash: int
    ) -> None:
        """Give the weights their version once all ranks agree, or bar the engine on all."""
        try:
            raise_together(error, self.world, source_hash=replica_hash)
        except WeightSyncError as err:
            self._shared.forget()
            self.engine.set_weights_version(previous_version)
            self.engine.mark_stale(f"the last weight sync failed the check {err.check!r}")
            raise
        self.engine.set_weights_version(previous_version + 1)


def _places(pairs: Sequence[PlannedParameter]) -> dict[str, Place]:
    shards = ((pair.name, pair.source.local_shard, pair.source.shape) for pair in pairs)
    return {name: (x.data_ptr(), x.stride(), tuple(shape)) for name, x, shape in shards}


def _num_bytes(pairs: Sequence[PlannedParameter]) -> int:
    return sum(pair.num_bytes for pair in pairs)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / MEGABYTE:.1f} MB"
