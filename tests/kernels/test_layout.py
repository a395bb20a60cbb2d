"""Bucket plans: every element of every rank's shard lies in exactly one place."""

import itertools
import random

import pytest
import torch

from lightrft.kernels import BucketLayout, TensorSpec


def even_shards(numel, world):
    cuts = [numel * rank // world for rank in range(world + 1)]
    return tuple(itertools.pairwise(cuts))


def random_specs(seed, world):
    rng = random.Random(seed)
    specs = []
    for index in range(25):
        shape = tuple(rng.randint(0 if index % 9 == 8 else 1, 40) for _ in range(rng.randint(0, 3)))
        numel = torch.Size(shape).numel()
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.int8])
        kind = rng.choice(["local", "gather", "broadcast"])
        owner = rng.randrange(world)
        shards = {
            "local": ((0, numel),),
            "gather": even_shards(numel, world),
            "broadcast": tuple((0, numel) if r == owner else (0, 0) for r in range(world)),
        }[kind]
        specs.append(TensorSpec(f"p{index}", shape, dtype, shards))
    return specs


@pytest.mark.parametrize("bucket_bytes", [1, 300, 4096, 10**6])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_segments_tile_every_shard_without_overlap(world, bucket_bytes):
    specs = random_specs(world * 7 + bucket_bytes, world)
    layout = BucketLayout.plan(specs, bucket_bytes=bucket_bytes, alignment=16)
    for spec in specs:
        segments = [s for b in layout.buckets for s in b.segments if s.name == spec.name]
        for rank, (start, stop) in enumerate(spec.shards):
            ranges = [s.ranges[rank] for s in segments if s.numel]
            assert [a for a, _ in ranges] + [stop] == [start] + [b for _, b in ranges] or (
                start == stop and all(a == b for a, b in ranges)
            )
    for bucket in layout.buckets:
        position = 0
        for segment in bucket.segments:
            assert segment.byte_offset >= position
            assert segment.byte_offset % 16 == 0
            largest = max(stop - start for start, stop in segment.ranges)
            position = segment.byte_offset + largest * segment.dtype.itemsize
        assert position <= bucket.bytes_per_rank
        assert bucket.num_bytes <= max(bucket_bytes, 16 * bucket.num_parts)


def test_a_tensor_larger_than_a_bucket_is_split_in_proportion():
    spec = TensorSpec("w", (10, 100), torch.float32, ((0, 600), (600, 1000)))
    layout = BucketLayout.plan([spec], bucket_bytes=1024, alignment=16)
    parts = [segment.ranges for bucket in layout.buckets for segment in bucket.segments]
    assert len(parts) == 5  # 600 * 4 bytes in parts of at most 512
    assert parts[0] == ((0, 128), (600, 685))
    assert parts[-1] == ((512, 600), (941, 1000))
    assert not any(segment.is_whole for bucket in layout.buckets for segment in bucket.segments)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [3, 130, 700])
def test_every_bucket_but_the_last_is_full(world, num_rows):
    """So the number of collectives is the smallest possible, whatever the sizes of the tensors."""
    size = num_rows * 8
    shards = tuple((size * r // world, size * (r + 1) // world) for r in range(world))
    specs = [TensorSpec(f"p{i}", (num_rows, 8), torch.float32, shards) for i in range(40)]
    layout = BucketLayout.plan(specs, bucket_bytes=65536, alignment=256)
    assert len(layout.buckets) == -(-sum(b.num_bytes for b in layout.buckets) // 65536)
    assert all(bucket.num_bytes == 65536 for bucket in layout.buckets[:-1])


def test_buckets_hold_one_kind_and_owner_and_count_bytes():
    world = 2
    specs = [
        TensorSpec("a", (8,), torch.float32, ((0, 4), (4, 8))),
        TensorSpec("b", (8,), torch.bfloat16, ((0, 8),)),
        TensorSpec("c", (8,), torch.float32, ((0, 0), (0, 8))),
        TensorSpec("d", (2, 2), torch.float32, ((0, 2), (2, 4))),
    ]
    layout = BucketLayout.plan(specs, alignment=16)
    summary = [(b.kind, b.owner, [s.name for s in b.segments]) for b in layout.buckets]
    assert summary == [
        ("gather", None, ["a", "d"]),
        ("local", None, ["b"]),
        ("broadcast", 1, ["c"]),
    ]
    assert layout.group_size == world
    assert layout.num_bytes == 32 + 16 + 32 + 16
    assert sum(b.num_bytes for b in layout.buckets) == 2 * (16 + 16) + 16 + 32


@pytest.mark.parametrize(
    "shards",
    [(), ((0, 5),), ((0, 4), (5, 6)), ((3, 6), (0, 3)), ((0, 4), (3, 6)), ((0, 6), (6, 3))],
)
def test_shards_that_do_not_cover_the_tensor_are_refused(shards):
    with pytest.raises(ValueError, match="'w' must be disjoint, ordered by rank and cover"):
        TensorSpec("w", (2, 3), torch.float32, shards)


def test_plan_refuses_repeated_names_and_unequal_groups():
    spec = TensorSpec("w", (6,), torch.float32, ((0, 6),))
    with pytest.raises(ValueError, match="unique: got w more than once"):
        BucketLayout.plan([spec, spec])
    two = TensorSpec("a", (6,), torch.float32, ((0, 3), (3, 6)))
    three = TensorSpec("b", (6,), torch.float32, ((0, 2), (2, 4), (4, 6)))
    with pytest.raises(ValueError, match=r"shard counts \[2, 3\]"):
        BucketLayout.plan([two, three])
    with pytest.raises(ValueError, match="alignment"):
        BucketLayout.plan([spec], alignment=24)
    with pytest.raises(ValueError, match="bucket_bytes"):
        BucketLayout.plan([spec], bucket_bytes=0)
