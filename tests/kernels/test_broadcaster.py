"""Buckets that arrive hold the tensors that were sent, at one collective for each."""

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_multiprocess

from lightrft.kernels import BucketBroadcaster, BucketLayout, TensorSpec
from lightrft.kernels.weight_bucket.broadcaster import Timeline


def full_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (37, 16), "norm": (16,), "up": (50, 16), "bias": (1,), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def plan(kinds, world, bucket_bytes, dtype):
    specs = []
    for name, tensor in full_tensors().items():
        numel = tensor.numel()
        # Uneven on purpose: row shards of the last rank are shorter, as with FSDP2.
        step = -(-numel // world)
        shards = {
            "local": ((0, numel),),
            "gather": tuple(
                (min(step * r, numel), min(step * (r + 1), numel)) for r in range(world)
            ),
            "owner": tuple((0, numel) if r == world - 1 else (0, 0) for r in range(world)),
        }[kinds[name]]
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, shards))
    return BucketLayout.plan(specs, bucket_bytes=bucket_bytes, alignment=16)


def shard_source(layout, rank):
    tensors = full_tensors()
    shards = {spec.name: spec.shards for spec in layout.specs}

    def source(name):
        ranges = shards[name]
        start, stop = ranges[rank if len(ranges) > 1 else 0]
        return tensors[name].reshape(-1)[start:stop]

    return source


def receive(broadcaster, source, add_local=None):
    """What a consumer assembles; NaN where nothing was written."""
    received = {}
    whole = set()
    arrived = broadcaster.gather(source, add_local=add_local)
    for bucket, pieces in zip(broadcaster.layout.buckets, arrived, strict=True):
        for piece in pieces:
            numel = torch.Size(piece.shape).numel()
            flat = received.setdefault(piece.name, torch.full((numel,), float("nan")))
            part = flat[piece.start : piece.start + piece.tensor.numel()]
            assert part.isnan().all()
            part.copy_(piece.tensor)
            if piece.tensor.numel() == numel:
                whole.add(piece.name)
        for segment in bucket.segments:
            # A tensor wholly inside one bucket must come as one piece.
            assert not segment.is_whole or segment.name in whole
    return received


def add_position(name, start, values):
    values += torch.arange(start, start + values.numel()) / 1000


def check(broadcaster, rank, dtype):
    layout = broadcaster.layout
    received = receive(broadcaster, shard_source(layout, rank))
    with_update = receive(broadcaster, shard_source(layout, rank), add_position)
    for name, tensor in full_tensors().items():
        flat = tensor.reshape(-1)
        assert torch.equal(received[name], flat.to(dtype).float()), name
        added = flat + torch.arange(flat.numel()) / 1000
        assert torch.equal(with_update[name], added.to(dtype).float()), name


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 10**6])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_local_buckets_need_no_process_group(bucket_bytes, buffers):
    kinds = dict.fromkeys(full_tensors(), "local")
    layout = plan(kinds, 1, bucket_bytes, torch.bfloat16)
    broadcaster = BucketBroadcaster(layout, None, buffers=buffers)
    check(broadcaster, 0, torch.bfloat16)
    assert broadcaster.num_payload_collectives == 0


def exchange(rank, world):
    mixed = {"embed": "gather", "norm": "owner", "up": "gather", "bias": "local", "empty": "gather"}
    dist.init_process_group("gloo")
    for kinds in (mixed, dict.fromkeys(mixed, "gather"), dict.fromkeys(mixed, "owner")):
        for dtype in (torch.float32, torch.bfloat16):
            for bucket_bytes, buffers in ((500, 2), (2000, 1), (10**6, 2)):
                layout = plan(kinds, world, bucket_bytes, dtype)
                broadcaster = BucketBroadcaster(layout, dist.group.WORLD, buffers=buffers)
                check(broadcaster, rank, dtype)
                num_moving = sum(bucket.kind != "local" for bucket in layout.buckets)
                assert broadcaster.num_payload_collectives == 2 * num_moving


def test_every_rank_receives_all_tensors():
    run_multiprocess(exchange, 3)


def test_wrong_sizes_are_refused():
    layout = plan(dict.fromkeys(full_tensors(), "gather"), 2, 1000, torch.float32)
    with pytest.raises(ValueError, match="planned for 2 ranks: got a group of 1"):
        BucketBroadcaster(layout, None)
    local = plan(dict.fromkeys(full_tensors(), "local"), 1, 1000, torch.float32)
    with pytest.raises(ValueError, match="buffers"):
        BucketBroadcaster(local, None, buffers=0)
    with pytest.raises(ValueError, match="shard of 'embed' must have at least"):
        next(BucketBroadcaster(local, None).gather(lambda name: torch.zeros(3)))


class RecordedTimeline(Timeline):
    """Writes down what is ordered; `filling` says which calls happen while buckets are filled."""

    def __init__(self, device):
        super().__init__(device)
        self.events = events = []
        RecordedTimeline.last_events = events

    def begin(self):
        self.events.append("begin")

    def hand_over(self):
        self.events.append("hand over")

    def end(self, works):
        self.events.append(f"end with {len(list(works))} in flight")


class RecordedBroadcaster(BucketBroadcaster):
    timeline = RecordedTimeline


def test_slots_are_handed_back_only_after_what_fills_them():
    """Whoever stops early, or fails, would otherwise free memory that a stream still writes."""
    layout = plan(dict.fromkeys(full_tensors(), "local"), 1, 500, torch.float32)
    assert len(layout.buckets) > 4
    source = shard_source(layout, 0)
    abandoned = RecordedBroadcaster(layout, None).gather(source)
    next(abandoned)
    abandoned.close()
    assert RecordedTimeline.last_events == ["begin", "begin", "hand over", "end with 0 in flight"]
    broken = RecordedBroadcaster(layout, None).gather(lambda name: torch.zeros(0))
    with pytest.raises(ValueError, match="shard of"):
        next(broken)
    assert RecordedTimeline.last_events == ["begin", "end with 0 in flight"]
    list(RecordedBroadcaster(layout, None).gather(source))
    assert RecordedTimeline.last_events[-2:] == ["hand over", "end with 0 in flight"]


@pytest.mark.gpu
def test_memory_of_an_abandoned_transfer_is_not_written_any_more():
    numel = 2**22
    specs = [TensorSpec(f"w{i}", (numel,), torch.float32, ((0, numel),)) for i in range(4)]
    layout = BucketLayout.plan(specs, bucket_bytes=4 * numel)
    ones = torch.ones(numel, device="cuda")

    def late(name):
        torch.cuda._sleep(200_000_000)  # on the stream that fills
        return ones

    gathered = BucketBroadcaster(layout, None, device="cuda").gather(late)
    next(gathered)
    gathered.close()
    # The freed memory, whichever blocks these are.
    others = [torch.full((4 * numel,), 7, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)
