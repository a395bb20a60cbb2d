"""Transport of weights from the ranks that train to those that generate, shards by their owners.

A rank that generates receives a share of each bucket; then these ranks exchange their shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.kernels import BucketLayout, WeightPiece
from lightrft.kernels.weight_bucket.broadcaster import (
    BucketPacker,
    ShardSource,
    Timeline,
    bucket_pieces,
)
from lightrft.kernels.weight_bucket.layout import Bucket, FlatRange
from lightrft.strategy.distributed.context import print_on_first_rank
from lightrft.strategy.split.bridge import FOREVER, Bridge, GroupBackend
from lightrft.strategy.weight_sync.parameter_source import AddLocal

_ALIGNMENT = 256
_NUM_SLOTS = 2


def wire_backend(gpus: Sequence[str]) -> GroupBackend:
    """Return NCCL if every rank has a separate GPU; it refuses two ranks of one GPU.

    Args:
        gpus: Identity of each rank's GPU; "" for a rank without one.
    """
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def identity_of(device: torch.device) -> str:
    """Return the identity of a GPU, the same in all processes that use it; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@dataclass(frozen=True, slots=True)
class Route:
    """Bytes of a bucket by the rank that sends them, and by the rank that receives them first.

    Args:
        sent: Range of each rank that trains; together they are the bucket.
        received: Range of each rank that generates, all but the last ones of `share` bytes.
        share: Bytes of the largest of these.
    """

    sent: tuple[FlatRange, ...]
    received: tuple[FlatRange, ...]
    share: int

    @classmethod
    def of(
        cls, bucket: Bucket, owners: Sequence[int], num_training: int, num_generating: int
    ) -> Route:
        """Plan the route of a bucket.

        Args:
            bucket: Bucket, whose kind decides its ranges.
            owners: Ranks that hold the shards, in the order of the layout. Another rank may leave
                them out: it sends none.
            num_training, num_generating: Ranks of both sides.
        """
        size, part = bucket.num_bytes, bucket.bytes_per_rank
        sent = [(0, 0)] * num_training
        if bucket.kind == "local":  # every rank that trains holds it
            sent = _divided(size, num_training)
        for number, rank in enumerate(owners):
            if bucket.kind == "gather":
                sent[rank] = number * part, (number + 1) * part
            elif bucket.kind == "broadcast" and number == bucket.owner:
                sent[rank] = 0, size
        received = _divided(size, num_generating)
        return cls(tuple(sent), tuple(received), received[0][1])

    def sizes_from(self, rank: int) -> list[int]:
        """Return the bytes that a rank that trains sends to each rank that generates."""
        return [_common(self.sent[rank], each) for each in self.received]

    def sizes_to(self, rank: int) -> list[int]:
        """Return the bytes that a rank that generates receives from each rank that trains."""
        return [_common(each, self.received[rank]) for each in self.sent]


def _divided(size: int, num_parts: int) -> list[FlatRange]:
    """Return aligned ranges; the first is the largest."""
    share = -(-size // num_parts // _ALIGNMENT) * _ALIGNMENT if num_parts > 1 else size
    return list(pairwise(min(size, number * share) for number in range(num_parts + 1)))


def _common(one: FlatRange, other: FlatRange) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


@dataclass(slots=True)
class _WireSlot:
    """Memory of one bucket in transit.

    Args:
        full: Memory of the bucket, or of the sent part, on the rank's device.
        spare: Memory on that device where tensors are assembled.
        moved: Memory that the group can move: `full`, or pinned memory of the host.
        share: Memory like `moved`, for the share that arrives first if several ranks generate.
        work: Collective in progress.
        has_moved: Function that waits for the copy between `full` and `moved`.
    """

    full: Tensor
    spare: Tensor
    moved: Tensor
    share: Tensor
    work: dist.Work | None = None
    has_moved: Callable[[], None] = field(default=lambda: None)

    @property
    def is_staged(self) -> bool:
        """Return whether bytes stop in the host's memory on their way."""
        return self.moved is not self.full


class WeightWire:
    """Transport of buckets; all ranks of the launch take part in each.

    If every rank has a separate GPU, shards go from GPU to GPU. Otherwise they pass the hosts'
    memory, on ranks with a GPU through pinned memory that is kept between syncs.

    Args:
        bridge: Connection of the two sides.
        device: Device of this rank; None queries it when the first weights are sent.
        allocate: Function that makes memory, as `torch.empty` does.
        timeline: Class that orders filling and use.
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        device: torch.device | None = None,
        allocate: Callable[..., Tensor] = torch.empty,
        timeline: type[Timeline] = Timeline,
    ) -> None:
        self._bridge, self._side, self._device = bridge, bridge.side, device
        self._allocate, self._timeline = allocate, timeline
        self._backend: GroupBackend | None = None
        self._group = bridge.everyone
        self._engines: dist.ProcessGroup | None = None
        self._pinned: list[Tensor] = []
        self._layout: BucketLayout | None = None

    def is_new(self, layout: BucketLayout) -> bool:
        """Return whether the last sync had another layout."""
        before, self._layout = self._layout, layout
        return before is not layout

    def _connect(self) -> torch.device:
        """Open the groups at the first call, which all ranks of the launch make together.

        Returns:
            Device of this rank.
        """
        bridge, side = self._bridge, self._side
        index = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        device = self._device = self._device or torch.device(index)
        if self._backend is not None:
            return device
        gpu = identity_of(device).encode()
        gpus = [each.decode() for each in bridge.exchange_bytes([gpu] * bridge.world_size)]
        backend = self._backend = wire_backend(gpus)
        if backend == "nccl":
            self._group = bridge.open_group("weights", bridge.rank, bridge.world_size, backend)
        if side.generates and side.num_generating > 1:
            self._engines = bridge.open_group("engines", side.rank, side.num_generating, backend)
        way = "from GPU to GPU (nccl)" if backend == "nccl" else "through the hosts' memory (gloo)"
        print_on_first_rank(None, f"weights reach the ranks that generate {way}", is_detail=True)
        return device

    def _slots(self, size: int, share: int) -> list[_WireSlot]:
        """Return memory of the buckets in flight.

        Args:
            size: Bytes of a bucket, or of the sent part.
            share: Bytes that arrive first; 0 if they are the whole bucket.
        """
        device = self._connect()
        is_staged = device.type == "cuda" and self._backend == "gloo"
        if is_staged and (not self._pinned or self._pinned[0].numel() < size + share):
            self._pinned = [
                self._allocate(size + share, dtype=torch.uint8, pin_memory=True)
                for _ in range(_NUM_SLOTS)
            ]
        slots = []
        for number in range(_NUM_SLOTS):
            spare_size = size if self._side.generates else 0
            full, spare = (
                self._allocate(n, dtype=torch.uint8, device=device) for n in (size, spare_size)
            )
            if is_staged:
                moved = self._pinned[number]
                slots.append(_WireSlot(full, spare, moved[:size], moved[size : size + share]))
            else:
                slots.append(_WireSlot(full, spare, full, spare[:share]))
        return slots

    def _begin(self, slot: _WireSlot, incoming: Tensor, outgoing: Tensor, sizes: list[int]) -> None:
        """Begin an exchange over all ranks.

        Args:
            slot: Slot for the collective.
            incoming, outgoing: [bytes] uint8; one of them is empty.
            sizes: Bytes from or to each rank of the other side.
        """
        options = dist.AllToAllOptions()
        options.timeout = FOREVER
        num_training = self._side.num_training
        nothing = [0] * self._bridge.world_size
        if self._side.generates:
            lengths, counts = sizes + nothing[num_training:], nothing
        else:
            lengths, counts = nothing, nothing[:num_training] + sizes
        slot.work = self._group.alltoall_base(incoming, outgoing, lengths, counts, options)

    def _finish(self, slot: _WireSlot) -> None:
        """Wait for a slot's collective, if there is one."""
        work, slot.work = slot.work, None
        if work is not None:
            self._bridge.wait(lambda: work)

    def send(
        self,
        layout: BucketLayout,
        owners: Sequence[int],
        sources: ShardSource,
        *,
        add_local: AddLocal | None = None,
    ) -> None:
        """Send this rank's part of all buckets. After a failure go on: others wait.

        Args:
            layout: Layout of the buckets, equal on every rank that trains.
            owners: See `Route.of`.
            sources, add_local: See `BucketBroadcaster.gather`.

        Raises:
            Exception: The first failure of packing.
        """
        rank, problem = self._side.rank, None
        device = self._connect()
        packer = BucketPacker(layout, owners.index(rank) if rank in owners else 0, device)
        largest = max((b.bytes_per_rank for b in layout.buckets), default=0)
        slots, waiting = cycle(self._slots(largest, 0)), deque[tuple[_WireSlot, Route, slice]]()
        timeline = self._timeline(device)
        for bucket in _moving(layout):
            route, slot = self._route(bucket, owners), next(slots)
            self._finish(slot)
            timeline.begin()
            start, stop = route.sent[rank]
            first = 0 if bucket.kind == "gather" else start
            part = slice(first, first + stop - start)
            with timeline.filling():
                try:
                    if stop > start:
                        packer.pack(bucket, slot.full[: bucket.bytes_per_rank], sources, add_local)
                except Exception as error:  # noqa: BLE001 - raised once all buckets are sent
                    problem = problem or error
                if slot.is_staged:
                    slot.moved[part].copy_(slot.full[part], non_blocking=True)
                    slot.has_moved = timeline.mark()
            waiting.append((slot, route, part))
            # A copy to the host runs while the bucket before it is sent.
            while len(waiting) > slot.is_staged:
                self._begin_sending(*waiting.popleft(), timeline)
        while waiting:
            self._begin_sending(*waiting.popleft(), timeline)
        for slot in (next(slots) for _ in range(_NUM_SLOTS)):
            self._finish(slot)
        timeline.end(())
        if problem is not None:
            raise problem

    def _begin_sending(
        self, slot: _WireSlot, route: Route, part: slice, timeline: Timeline
    ) -> None:
        slot.has_moved()
        with timeline.filling():
            sizes = route.sizes_from(self._side.rank)
            self._begin(slot, slot.moved[:0], slot.moved[part], sizes)

    def receive(
        self, layout: BucketLayout, owners: Sequence[int]
    ) -> Iterator[tuple[WeightPiece, ...]]:
        """Yield the pieces of every bucket, which are valid until the next bucket."""
        device = self._connect()
        routes = [(bucket, self._route(bucket, owners)) for bucket in _moving(layout)]
        share = max((route.share for _, route in routes), default=0)
        num_shares = self._side.num_generating
        size = max([share * num_shares, *(bucket.num_bytes for bucket, _ in routes)])
        slots = self._slots(size, 0 if num_shares == 1 else share)
        timeline = self._timeline(device)
        for number in range(len(routes) + 1):
            if number < len(routes):
                timeline.begin()
                self._begin_receiving(slots[number % _NUM_SLOTS], routes[number][1], timeline)
            if number:
                bucket, route = routes[number - 1]
                slot = slots[(number - 1) % _NUM_SLOTS]
                self._finish(slot)
                with timeline.filling():
                    pieces = self._unpacked(slot, bucket, route)
                    slot.has_moved = timeline.mark()
                timeline.hand_over()
                self._bridge.count_received(bucket.num_bytes)
                yield pieces
        timeline.end(())

    def _begin_receiving(self, slot: _WireSlot, route: Route, timeline: Timeline) -> None:
        slot.has_moved()
        sizes = route.sizes_to(self._side.rank)
        memory = slot.moved if self._engines is None else slot.share
        with timeline.filling():
            self._begin(slot, memory[: sum(sizes)], memory[:0], sizes)

    def _unpacked(self, slot: _WireSlot, bucket: Bucket, route: Route) -> tuple[WeightPiece, ...]:
        """Return the pieces of a bucket whose share has arrived."""
        engines = self._engines
        if engines is not None:
            together = slot.moved[: route.share * self._side.num_generating]
            share = slot.share[: route.share]
            self._bridge.wait(lambda: engines._allgather_base(together, share), within_side=True)
        if slot.is_staged:
            slot.full[: bucket.num_bytes].copy_(slot.moved[: bucket.num_bytes], non_blocking=True)
        return bucket_pieces(bucket, slot.full, slot.spare)

    def _route(self, bucket: Bucket, owners: Sequence[int]) -> Route:
        return Route.of(bucket, owners, self._side.num_training, self._side.num_generating)


def _moving(layout: BucketLayout) -> list[Bucket]:
    """Return the buckets that have bytes."""
    return [bucket for bucket in layout.buckets if bucket.num_bytes]
