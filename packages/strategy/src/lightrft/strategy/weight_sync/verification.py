"""Verification of a weight sync: accounting before it, hashes after it, agreement of the ranks."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.engines.types import EngineParameter
from lightrft.kernels import WeightPiece, combine_hashes, hash_tensors
from lightrft.strategy.distributed.collectives import (
    Group,
    gather_objects,
    nonfinite_names,
    transfer_device,
)
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    local_rank_in,
)

Check = Literal["accounting", "finite", "hash", "canary", "caches", "transfer", "peer"]
MAX_LISTED_NAMES = 8
PEER_FAILED: Final = "peer"
"""Check of an error that only says that another rank has one."""
_MASK = 2**64 - 1


class WeightSyncError(RuntimeError):
    """The engine does not, or would not, hold the trainer's weights.

    Attributes:
        check: Check that failed: "accounting" (names and shapes, before anything was sent),
            "finite" (raised as a NonFiniteError), "transfer" (the engine refused a tensor), "hash"
            (final storage), "canary" (logprobs of a fixed prompt), "caches" (activations of earlier
            weights) or "peer" (another rank).
        names: Checkpoint names of the parameters concerned; empty if none is to blame.
    """

    def __init__(self, check: Check, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(f"weight sync failed ({check}): {message}")
        self.check: Check = check
        self.names = tuple(names)


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """An engine parameter together with the trainer's parameter that fills it."""

    target: EngineParameter
    source: SourceParameter

    @property
    def name(self) -> str:
        """The engine's name of the parameter."""
        return self.target.name

    @property
    def num_bytes(self) -> int:
        """Bytes in the engine's dtype."""
        return self.target.numel * self.target.dtype.itemsize


def match_parameters(
    manifest: Sequence[EngineParameter],
    parameters: Sequence[SourceParameter],
    tied_names: Mapping[str, str],
) -> tuple[PlannedParameter, ...]:
    """Pair every engine parameter with separate storage with its source.

    A parameter that the engine ties to another has no storage and is left out; one that only the
    trainer ties is filled from the parameter it shares there.

    Args:
        manifest: All parameters of the engine.
        parameters: All parameters of the trainer, tied ones once.
        tied_names: The trainer's second names of tied parameters -> the name in `parameters`.

    Returns:
        Pairs in the order of the manifest.

    Raises:
        WeightSyncError: Names are missing on either side, shapes differ, or the engine ties what
            the trainer holds separately; the message lists all of them.
    """
    sources = {parameter.checkpoint_name: parameter for parameter in parameters}
    owners = {name: name for name in sources} | dict(tied_names)
    pairs: list[PlannedParameter] = []
    problems: dict[str, str] = {}
    for target in manifest:
        owner = owners.get(target.name)
        if target.tied_to is not None:
            if owner is not None and owner != owners.get(target.tied_to):
                problems[target.name] = f"tied to {target.tied_to!r} in the engine only"
        elif owner is None:
            problems[target.name] = "needed by the engine, unknown to the trainer"
        elif sources[owner].shape != target.shape:
            problems[target.name] = (
                f"shape {sources[owner].shape} in the trainer, {target.shape} in the engine"
            )
        else:
            pairs.append(PlannedParameter(target, sources[owner]))
    known = {target.name for target in manifest}
    used = {owners[name] for name in known if name in owners}
    for name in sources:
        if name not in used:
            problems[name] = "held by the trainer, unknown to the engine"
    if problems:
        described = (f"{name} ({problem})" for name, problem in problems.items())
        raise WeightSyncError("accounting", listed(described), problems)
    return tuple(pairs)


def parameters_to_send(
    pairs: Sequence[PlannedParameter], resident_names: frozenset[str]
) -> tuple[PlannedParameter, ...]:
    """Return pairs that must be written now; the others are frozen and resident.

    Args:
        pairs: All parameters of the engine.
        resident_names: Frozen parameters that the engine verifiably holds already. One that shares
            an engine tensor with a sent parameter is sent with it.
    """
    names = {pair.name for pair in pairs if pair.name not in resident_names}
    for pair in pairs:
        if pair.name in names:
            names.update(pair.target.fused_with)
    return tuple(pair for pair in pairs if pair.name in names)


def listed(items: Iterable[str]) -> str:
    """Return the first items, and how many more there are."""
    names = list(items)
    hidden = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")


def mix64(value: int) -> int:
    """Return Splitmix64's output function on one unsigned 64-bit integer."""
    mixed = (value + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def model_hash(hashes: Mapping[str, int]) -> int:
    """Return the hash of a model: sum of mix64(digest(name) XOR hash) over parameters mod 2^64.

    `digest` is the 8-byte BLAKE2b digest of the name, little-endian. Order does not matter.

    Args:
        hashes: Checkpoint name -> hash of the parameter.

    Returns:
        Signed 64-bit integer; 0 for no parameters.
    """
    total = 0
    for name, value in hashes.items():
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        total += mix64(int.from_bytes(digest, "little") ^ (value & _MASK))
    return ((total + 2**63) & _MASK) - 2**63


def source_hashes(
    pairs: Sequence[PlannedParameter], source: ParameterSource, own: Sequence[int]
) -> tuple[dict[str, int], int]:
    """Return hashes of the trainer's parameters in the engine's dtypes, from shards in place.

    Costs one all-reduce of 8 bytes a parameter over the source's group, none if that is None.

    Args:
        pairs, source: Parameters with their source.
        own: Local `shard_hashes` of the pairs.

    Returns:
        Engine name -> signed hash of the full parameter, and a hash of what only this rank can
        vouch for: the parameters it holds whole.
    """
    rank = local_rank_in(source.group)
    unsharded = {p.name: h for p, h in zip(pairs, own, strict=True) if not p.source.is_sharded}
    total = torch.tensor(
        [h if p.source.is_sharded or rank == 0 else 0 for p, h in zip(pairs, own, strict=True)],
        dtype=torch.int64,
    )
    if source.group is not None:
        total = total.to(transfer_device(source.group))
        # int64 addition wraps, which is the sum modulo 2^64.
        dist.all_reduce(total, group=source.group)
    hashes = dict(zip((pair.name for pair in pairs), total.tolist(), strict=True))
    return hashes, model_hash({**hashes, **unsharded})


def shard_hashes(
    pairs: Sequence[PlannedParameter], source: ParameterSource
) -> tuple[list[int], list[str]]:
    """Return hashes of this rank's ranges as they are sent, and names of what overflows."""
    rank = local_rank_in(source.group)
    starts = [pair.source.range_on(rank)[0] for pair in pairs]
    if source.add_local is None:
        shards = [(pair.name, pair.source.local_shard) for pair in pairs]
        dtypes = [pair.target.dtype for pair in pairs]
        hashes = hash_tensors([shard for _, shard in shards], starts=starts, dtypes=dtypes)
        return hashes, nonfinite_names(shards, dtypes=dtypes)
    hashes, odd = [], []
    # One after the other: a shard with its adapters is a copy.
    for pair, start in zip(pairs, starts, strict=True):
        shard = cast_shard(pair.source, source, start, pair.target.dtype)
        hashes += hash_tensors([shard], starts=[start])
        odd += nonfinite_names([(pair.name, shard)])
    return hashes, odd


def cast_shard(
    parameter: SourceParameter, source: ParameterSource, start: int, dtype: torch.dtype
) -> Tensor:
    """Return this rank's range as sent: adapters added in float32, then rounded once."""
    values = parameter.local_shard
    if source.add_local is not None:
        values = values.to(torch.float32, copy=True)
        source.add_local(parameter.checkpoint_name, start, values)
    return values.to(dtype)


def note_hashes(hashes: dict[str, int], pieces: Sequence[WeightPiece]) -> None:
    """Add the hashes of pieces to those of their parameters."""
    piece_hashes = hash_tensors([p.tensor for p in pieces], starts=[p.start for p in pieces])
    for piece, value in zip(pieces, piece_hashes, strict=True):
        hashes[piece.name] = combine_hashes((hashes.get(piece.name, 0), value))


def common_hashes(*sources: ParameterSource) -> list[dict[str, int]]:
    """Return hashes of models' parameters by name, in the dtypes of the last. Collective."""
    dtypes = {entry.checkpoint_name: entry.local_shard.dtype for entry in sources[-1].parameters()}
    hashes = []
    for source in sources:
        pairs = [
            PlannedParameter(
                EngineParameter(name, entry.shape, dtypes.get(name, entry.local_shard.dtype)), entry
            )
            for entry in source.parameters()
            for name in (entry.checkpoint_name,)
        ]
        hashes.append(source_hashes(pairs, source, shard_hashes(pairs, source)[0])[0])
    return hashes


def weights_hash(source: ParameterSource) -> str:
    """Return one hash of all parameters, equal for every number of ranks. Collective."""
    return f"{model_hash(common_hashes(source)[0]) % 2**64:016x}"


def check_hashes(expected: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Compare the trainer's hashes with the engine's.

    Raises:
        WeightSyncError: A parameter differs or has no hash; the message names it.
    """
    names = [name for name, value in expected.items() if found.get(name) != value]
    if names:
        raise WeightSyncError(
            "hash",
            f"{len(names)} of {len(expected)} parameters in the engine differ from the trainer's: "
            f"{listed(names)}; the engine must not generate",
            names,
        )


def check_untouched(hashes: Mapping[str, int | None], before: Mapping[str, int | None]) -> None:
    """Compare the trainer's frozen parameters with what they were at the last sync.

    Args:
        hashes, before: Hashes by name; None for one that was not computed.

    Raises:
        WeightSyncError: A parameter has changed; the message names it.
    """
    names = [
        name
        for name, value in hashes.items()
        if (earlier := before.get(name)) is not None and value not in (None, earlier)
    ]
    if names:
        raise WeightSyncError(
            "hash",
            f"{len(names)} frozen parameters of the trainer changed since the last sync: "
            f"{listed(names)}; nothing may write them; load_ckpt and load_model may replace them",
            names,
        )


def raise_together(
    error: WeightSyncError | None, world: Group = None, *, source_hash: int = 0
) -> None:
    """End a stage on all ranks in the same way; one small collective.

    Args:
        error: Error of this rank, or None.
        world: Ranks that must agree; None is all of them.
        source_hash: Hash of the weights of this rank's replica.

    Raises:
        WeightSyncError: This rank failed, another rank failed (the message says which), or ranks
            hold different weights.
    """
    failure = None if error is None else (error.check, str(error))
    names = () if error is None else error.names[:MAX_LISTED_NAMES]
    try:
        reports = gather_objects((failure, names, source_hash), world)
    except RuntimeError as lost:
        # Ranks that were stuck in the engine have ended.
        if error is None:
            raise
        raise error from lost
    # First, since an engine made of several replicas fails its checks too.
    odd_ranks = [rank for rank, entry in enumerate(reports) if entry[2] != reports[0][2]]
    if odd_ranks:
        raise WeightSyncError(
            "hash",
            f"rank(s) {odd_ranks} hold other weights than rank 0, although every rank must hold "
            "the same; the trainer's replicas have diverged",
        ) from error
    if error is not None and error.check != PEER_FAILED:
        raise error
    for rank, (failed, failed_names, _) in enumerate(reports):
        if failed is not None and failed[0] != PEER_FAILED:
            raise WeightSyncError(failed[0], f"on rank {rank}: {failed[1]}", failed_names)
