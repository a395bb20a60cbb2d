"""Plan of weight buckets: the places of each tensor's bytes. Pure; touches no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

BucketKind = Literal["local", "gather", "broadcast"]
FlatRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Logical tensor, and the part of it that each rank holds.

    Args:
        name: Unique name.
        shape: Full shape.
        dtype: dtype in which it is transferred.
        shards: Flat range `shards[r] = (start, stop)` of the full tensor that rank r of the group
            holds. One entry `(0, numel)` means that every rank holds the whole tensor.

    Raises:
        ValueError: The ranges are not disjoint and ordered by rank, or do not cover the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[FlatRange, ...]

    def __post_init__(self) -> None:
        position = 0
        for start, stop in self.shards:
            if start == stop:
                continue
            if start != position or stop < start:
                break
            position = stop
        else:
            if self.shards and position == self.numel:
                return
        raise ValueError(
            f"shards of {self.name!r} must be disjoint, ordered by rank and cover "
            f"[0, {self.numel}): got {self.shards}"
        )

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor as it is transferred."""
        return self.numel * self.dtype.itemsize

    @property
    def owner(self) -> int | None:
        """Only rank that holds the tensor, or None if several or all do."""
        holders = [rank for rank, (start, stop) in enumerate(self.shards) if stop > start]
        return holders[0] if len(self.shards) > 1 and len(holders) == 1 else None

    @property
    def kind(self) -> BucketKind:
        """Way in which the tensor is transferred; an empty tensor never is."""
        if len(self.shards) == 1 or self.numel == 0:
            return "local"
        return "gather" if self.owner is None else "broadcast"


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of one tensor in one bucket.

    Args:
        name: Name of the tensor.
        shape: Full shape of the tensor.
        dtype: dtype of the bytes.
        ranges: Flat range of the full tensor from each rank of the group; one entry if every rank
            packs the same values.
        byte_offset: Offset in every rank's part of the bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[FlatRange, ...]
    byte_offset: int

    @property
    def numel(self) -> int:
        """Elements of the segment over all ranks."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Return whether the segment holds its whole tensor."""
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments that are transferred together.

    Args:
        kind: Transfer: "gather" (all-gather of equal parts), "broadcast" (from the owner) or
            "local".
        owner: Group rank that holds a broadcast bucket, else None.
        bytes_per_rank: Bytes that one rank packs.
        num_parts: Number of parts of the full bucket: the group size for "gather", else 1.
        segments: Segments in ascending `byte_offset`.
    """

    kind: BucketKind
    owner: int | None
    bytes_per_rank: int
    num_parts: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the full bucket, padding included."""
        return self.bytes_per_rank * self.num_parts


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Contiguous flat range of one full tensor, to be loaded into an engine.

    Args:
        name: Name of the tensor.
        shape: Full shape of the tensor.
        start: Index of the first element in the flattened full tensor.
        tensor: Elements from `start` on, [numel], in the dtype of their destination. It is valid
            until the next bucket is requested and, for an engine, until `load_weights` returns.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Return whether the piece holds every element of its tensor."""
        return self.start == 0 and self.tensor.numel() == math.prod(self.shape)


@dataclass(slots=True)
class _OpenBucket:
    """Bucket that still takes segments."""

    kind: BucketKind
    owner: int | None
    num_parts: int
    capacity_bytes: int
    filled_bytes: int = 0
    segments: list[Segment] = field(default_factory=list)

    @property
    def room_bytes(self) -> int:
        """Bytes that one rank can still add."""
        return self.capacity_bytes - self.filled_bytes

    def add(self, spec: TensorSpec, ranges: tuple[FlatRange, ...], alignment: int) -> None:
        """Append a part of a tensor."""
        largest = max(stop - start for start, stop in ranges)
        self.segments.append(Segment(spec.name, spec.shape, spec.dtype, ranges, self.filled_bytes))
        self.filled_bytes += -(-largest * spec.dtype.itemsize // alignment) * alignment

    def close(self) -> Bucket:
        return Bucket(
            self.kind, self.owner, self.filled_bytes, self.num_parts, tuple(self.segments)
        )


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Complete plan; every rank of the group computes the same one.

    Args:
        specs: Tensors in the caller's order.
        buckets: Buckets in the order of their transfer.
        group_size: Number of ranks that hold shards; 1 if nothing is sharded.
    """

    specs: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    group_size: int

    @classmethod
    def plan(
        cls, specs: Iterable[TensorSpec], *, bucket_bytes: int = 256 * 2**20, alignment: int = 256
    ) -> BucketLayout:
        """Place every tensor into buckets of at most `bucket_bytes`.

        Tensors of one kind (and owner) fill one bucket after another, in order, each to the end:
        there are ceil(padded bytes / bucket bytes) of them. A tensor that does not fit the room
        left is split so that each part takes a proportional range of every rank's shard. A bucket
        exceeds `bucket_bytes` only where one aligned element per rank does not fit.

        Args:
            specs: Tensors with unique names.
            bucket_bytes: Upper bound on a full bucket, in bytes.
            alignment: Every segment starts at a multiple of this many bytes; a power of two >= 16.

        Raises:
            ValueError: A size is out of range, names repeat, or shard counts disagree.
        """
        specs = tuple(specs)
        _validate(specs, bucket_bytes, alignment)
        group_size = max((len(spec.shards) for spec in specs), default=1)
        open_buckets: dict[tuple[BucketKind, int | None], _OpenBucket] = {}
        buckets: list[Bucket] = []
        for spec in specs:
            key = (spec.kind, spec.owner)
            num_parts = group_size if spec.kind == "gather" else 1
            capacity = max(alignment, bucket_bytes // num_parts // alignment * alignment)
            largest = max((stop - start for start, stop in spec.shards), default=0)
            position, is_placed = 0, False
            while not is_placed or position < largest:
                bucket = open_buckets.get(key)
                if bucket is None or bucket.room_bytes < alignment:
                    if bucket is not None:
                        buckets.append(bucket.close())
                    bucket = open_buckets[key] = _OpenBucket(*key, num_parts, capacity)
                count = min(largest - position, max(1, bucket.room_bytes // spec.dtype.itemsize))
                bucket.add(spec, _part(spec, position, position + count), alignment)
                position, is_placed = position + count, True
        buckets.extend(bucket.close() for bucket in open_buckets.values())
        return cls(specs, tuple(buckets), group_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all full tensors."""
        return sum(spec.num_bytes for spec in self.specs)


def _part(spec: TensorSpec, first: int, last: int) -> tuple[FlatRange, ...]:
    """Return the share of each rank's shard for elements [first, last) of the largest one.

    No share has more elements than last - first.
    """
    if spec.numel == 0:
        return ((0, 0),)
    largest = max(stop - start for start, stop in spec.shards)
    return tuple(
        (start + (stop - start) * first // largest, start + (stop - start) * last // largest)
        for start, stop in spec.shards
    )


def _validate(specs: Sequence[TensorSpec], bucket_bytes: int, alignment: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive: got {bucket_bytes}")
    if alignment < 16 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two of at least 16: got {alignment}")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be unique: got {', '.join(repeated)} more than once")
    counts = {len(spec.shards) for spec in specs if len(spec.shards) > 1}
    if len(counts) > 1:
        raise ValueError(
            f"all sharded tensors must name one range per rank of the same group: got shard "
            f"counts {sorted(counts)}"
        )
