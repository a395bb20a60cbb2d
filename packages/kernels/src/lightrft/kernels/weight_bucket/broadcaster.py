"""Transfer of buckets: one collective for each, overlapped with the use of the previous one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.kernels.weight_bucket.layout import Bucket, BucketLayout, Segment, WeightPiece
from lightrft.kernels.weight_bucket.operations import pack, unpack

ShardSource = Callable[[str], Tensor]
AddLocal = Callable[[str, int, Tensor], None]

try:
    from torch.distributed import all_gather_single as all_gather_single
except ImportError:  # torch < 2.13
    from torch.distributed import (  # type: ignore[assignment, unused-ignore]
        all_gather_into_tensor as all_gather_single,
    )

_ASSEMBLY_ALIGNMENT = 16


@dataclass(slots=True)
class _Slot:
    """Memory of one bucket in flight: this rank's part, and the full bucket."""

    packed: Tensor
    full: Tensor


@dataclass(slots=True)
class _BucketInFlight:
    bucket: Bucket
    slot: _Slot
    work: dist.Work | None


class Timeline:
    """Order of filling and using buckets, without host waits.

    On a GPU a separate stream fills buckets, ordered against the consumer's by events. In host
    memory everything runs in program order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def filling(self) -> AbstractContextManager[object]:
        """Queue work within the context on the filling stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """Order the consumer's work so far before any filling queued from now on."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self, works: Iterable[dist.Work]) -> None:
        """Order all filling before the consumer's work from now on."""
        if self._stream is not None:
            with self.filling():
                for work in works:
                    work.wait()  # this stream waits for the collective's, not the host
            self.hand_over()

    def mark(self) -> Callable[[], None]:
        """Record the filling queued so far; return a function that makes the host wait for it."""
        if self._stream is None:
            return lambda: None
        wait: Callable[[], None] = self._stream.record_event().synchronize
        return wait

    def hand_over(self) -> None:
        """Order the filling queued so far before the consumer's work from now on."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class BucketPacker:
    """Packer of one rank's part of buckets.

    Args:
        layout: Plan of the buckets.
        rank: Rank in the numbering of the layout's shards.
        device: Device where parts are summed and packed.
    """

    def __init__(self, layout: BucketLayout, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._shard_starts = {
            spec.name: spec.shards[rank if len(spec.shards) > 1 else 0][0] for spec in layout.specs
        }

    def pack(
        self, bucket: Bucket, out: Tensor, sources: ShardSource, add_local: AddLocal | None = None
    ) -> None:
        """Pack the part into `out` [bytes] uint8, from sources as in `BucketBroadcaster.gather`."""
        parts, offsets, dtypes = [], [], []
        for segment in bucket.segments:
            start, stop = segment.ranges[self._rank if len(segment.ranges) > 1 else 0]
            if start == stop:
                continue
            first = self._shard_starts[segment.name]
            shard = sources(segment.name)
            if shard.requires_grad:
                shard = shard.detach()
            if shard.numel() < stop - first:
                raise ValueError(
                    f"the shard of {segment.name!r} must have at least {stop - first} elements: "
                    f"got {shard.numel()}"
                )
            part = shard if shard.dim() == 1 else shard.reshape(-1)
            if stop - start != shard.numel():  # avoids the cost of views for small, whole tensors
                part = part[start - first : stop - first]
            if add_local is not None:
                # Added in float32 before the cast, so that the sum is rounded once.
                part = part.to(device=self._device, dtype=torch.float32, copy=True)
                add_local(segment.name, start, part)
            parts.append(part)
            offsets.append(segment.byte_offset)
            dtypes.append(segment.dtype)
        pack(parts, out, offsets, dtypes)


class BucketBroadcaster:
    """Gatherer of a layout's buckets from every rank's shards.

    All ranks of the group must iterate in step: each bucket that is not "local" costs exactly one
    collective.

    Args:
        layout: Plan, equal on every rank.
        group: Ranks that hold the shards, in the order of the layout's shards; None if the layout
            has only local buckets.
        buffers: Number of buckets in memory at a time: with 2 the next bucket is transferred while
            one is used, with 1 it is not.
        device: Device of the buckets. On a GPU a separate stream fills them. An event orders the
            consumer's stream after each bucket, and the host never waits.

    Attributes:
        num_payload_collectives: Number of collectives so far.
        timeline: Class that orders filling and use.

    Raises:
        ValueError: The group's size is not the layout's, or `buffers` < 1.
    """

    timeline: type[Timeline] = Timeline

    def __init__(
        self,
        layout: BucketLayout,
        group: dist.ProcessGroup | None,
        *,
        buffers: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if buffers < 1:
            raise ValueError(f"buffers must be at least 1: got {buffers}")
        group_size = 1 if group is None else dist.get_world_size(group)
        if layout.group_size not in (1, group_size):
            raise ValueError(
                f"the layout is planned for {layout.group_size} ranks: got a group of {group_size}"
            )
        self.layout = layout
        self.num_payload_collectives = 0
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._buffers = buffers
        self._device = torch.device(device)
        self._packer = BucketPacker(layout, self._rank, self._device)

    def gather(
        self, sources: ShardSource, *, add_local: AddLocal | None = None
    ) -> Iterator[tuple[WeightPiece, ...]]:
        """Yield the contents of each bucket of the layout, in order, once its bytes have arrived.

        A tensor that lies wholly in a bucket is one piece. A split tensor has one piece per rank
        that holds a part.

        Args:
            sources: Function that returns this rank's shard of a tensor, contiguous, in any
                floating dtype, or the whole tensor for local buckets. Called only for tensors of
                which this rank holds a part.
            add_local: Function `add_local(name, start, values)`, called for every range before its
                cast, that adds in place to `values` [numel] float32, the elements from `start` on.
        """
        timeline = self.timeline(self._device)
        slots = deque(self._allocate() for _ in range(self._buffers))
        in_flight: deque[_BucketInFlight] = deque()
        try:
            for bucket in self.layout.buckets:
                # The slot is packed again only after its last consumer.
                timeline.begin()
                with timeline.filling():
                    in_flight.append(self._launch(bucket, slots.popleft(), sources, add_local))
                if len(in_flight) == self._buffers:
                    yield from self._finish(in_flight, slots, timeline)
            while in_flight:
                yield from self._finish(in_flight, slots, timeline)
        finally:
            # An abandoned generator frees its slots: filling must end before the consumer's stream
            # reuses that memory.
            timeline.end([flight.work for flight in in_flight if flight.work is not None])

    def _finish(
        self, in_flight: deque[_BucketInFlight], slots: deque[_Slot], timeline: Timeline
    ) -> Iterator[tuple[WeightPiece, ...]]:
        flight = in_flight.popleft()
        with timeline.filling():
            if flight.work is not None:
                flight.work.wait()
            pieces = bucket_pieces(flight.bucket, flight.slot.full, flight.slot.packed)
        timeline.hand_over()
        yield pieces
        slots.append(flight.slot)

    def _allocate(self) -> _Slot:
        """Allocate memory for the largest bucket; whole tensors are also assembled in `packed`."""
        size = max((bucket.num_bytes for bucket in self.layout.buckets), default=0)

        memory = (torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2))
        return _Slot(*memory)

    def _launch(
        self, bucket: Bucket, slot: _Slot, sources: ShardSource, add_local: AddLocal | None
    ) -> _BucketInFlight:
        """Pack this rank's part and start the bucket's collective."""
        out = slot.packed if bucket.kind == "gather" else slot.full
        if bucket.kind != "broadcast" or bucket.owner == self._rank:
            self._packer.pack(bucket, out[: bucket.bytes_per_rank], sources, add_local)
        full = slot.full[: bucket.num_bytes]
        work = None
        if bucket.kind == "gather":
            part = slot.packed[: bucket.bytes_per_rank]
            work = all_gather_single(full, part, group=self._group, async_op=True)
        elif bucket.kind == "broadcast":
            work = dist.broadcast(full, group=self._group, group_src=bucket.owner, async_op=True)
        self.num_payload_collectives += bucket.kind != "local"
        return _BucketInFlight(bucket, slot, work)


def bucket_pieces(bucket: Bucket, full: Tensor, spare: Tensor) -> tuple[WeightPiece, ...]:
    """Return the pieces of a full bucket; whole tensors from several ranks become contiguous.

    Args:
        bucket: Bucket of the pieces.
        full: Contents of the bucket, [bytes] uint8.
        spare: Memory of at least its size for assembling whole tensors, [bytes] uint8.
    """
    offsets: list[int] = []
    outs: list[Tensor] = []
    pieces: list[WeightPiece] = []
    position = 0
    for segment in bucket.segments:
        parts = _parts(segment, bucket)
        if segment.is_whole and len(parts) != 1:
            num_bytes = segment.numel * segment.dtype.itemsize
            whole = spare[position : position + num_bytes].view(segment.dtype)
            position += -(-num_bytes // _ASSEMBLY_ALIGNMENT) * _ASSEMBLY_ALIGNMENT
            offsets += [offset for offset, _, _ in parts]
            outs += [whole[start:stop] for _, start, stop in parts]
            pieces.append(WeightPiece(segment.name, segment.shape, 0, whole))
            continue
        for offset, start, stop in parts:
            num_bytes = (stop - start) * segment.dtype.itemsize
            values = full[offset : offset + num_bytes].view(segment.dtype)
            pieces.append(WeightPiece(segment.name, segment.shape, start, values))
    unpack(full, offsets, outs)
    return tuple(pieces)


def _parts(segment: Segment, bucket: Bucket) -> list[tuple[int, int, int]]:
    """Return (byte offset in the full bucket, start, stop) of every non-empty part of a rank."""
    stride = bucket.bytes_per_rank if bucket.kind == "gather" else 0
    return [
        (rank * stride + segment.byte_offset, start, stop)
        for rank, (start, stop) in enumerate(segment.ranges)
        if stop > start
    ]
