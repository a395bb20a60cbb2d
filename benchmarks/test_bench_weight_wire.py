"""Weights to ranks that only generate: shards from their owners beside a gather and a broadcast.

OMP_NUM_THREADS=1 uv run pytest benchmarks/test_bench_weight_wire.py -s

Ranks are processes of one host with gloo, as without GPUs; both ways take turns in the same
processes. The other way: ranks that train gather each bucket, the first one joins its pieces and
broadcasts them, and those that generate copy each piece out. Bytes are those of bfloat16 weights.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
from tests.ranks import run_multiprocess

NUM_ROUNDS, BUCKET_BYTES = 9, 32 * 2**20
SHAPES = {f"layer{number}": (1024, 1024) for number in range(64)}
DTYPE = torch.bfloat16


def planned(num_training):
    from lightrft.kernels import BucketLayout, TensorSpec
    from lightrft.strategy.weight_sync.parameter_source import chunk_ranges

    specs = []
    for name, shape in SHAPES.items():
        whole = ((0, shape[0] * shape[1]),)
        shards = chunk_ranges(shape, num_training) if num_training > 1 else whole
        specs.append(TensorSpec(name, shape, DTYPE, shards))
    return BucketLayout.plan(specs, bucket_bytes=BUCKET_BYTES)


def sends(bridge, wire, layout, group):
    """Both ways of a rank that trains."""
    from lightrft.kernels import BucketBroadcaster

    rank = bridge.side.rank
    shards = {
        spec.name: torch.ones(stop - start, dtype=DTYPE)
        for spec in layout.specs
        for start, stop in [spec.shards[rank if len(spec.shards) > 1 else 0]]
    }
    owners = list(range(bridge.side.num_training))

    def by_owners():
        wire.send(layout, owners, shards.__getitem__)

    def by_the_first():
        for pieces in BucketBroadcaster(layout, group).gather(shards.__getitem__):
            if rank == 0:
                raw = [p.tensor.contiguous().view(torch.uint8).reshape(-1).cpu() for p in pieces]
                bridge._broadcast(torch.cat(raw))

    return by_owners, by_the_first


def receives(bridge, wire, layout):
    """Both ways of a rank that generates; tensors are written as an engine does."""
    weights = {name: torch.zeros(shape, dtype=DTYPE).view(-1) for name, shape in SHAPES.items()}
    owners = list(range(bridge.side.num_training))

    def by_owners():
        for pieces in wire.receive(layout, owners):
            for piece in pieces:
                stop = piece.start + piece.tensor.numel()
                weights[piece.name][piece.start : stop].copy_(piece.tensor)

    def by_the_first():
        for bucket in layout.buckets:
            sizes = [segment.numel * DTYPE.itemsize for segment in bucket.segments]
            values = torch.empty(sum(sizes), dtype=torch.uint8)
            bridge._broadcast(values)
            for segment, raw in zip(bucket.segments, values.split(sizes), strict=True):
                weights[segment.name][: segment.numel].copy_(raw.clone().view(DTYPE))

    return by_owners, by_the_first


def program(rank, world_size, num_generating):
    from lightrft.strategy.distributed.process_groups import (
        leave_side,
        start_process_group,
        take_side,
    )
    from lightrft.strategy.split.bridge import Bridge
    from lightrft.strategy.split.weight_wire import WeightWire

    torch.set_num_threads(1)
    with ExitStack() as stack:
        timeout = timedelta(seconds=120)
        side, store = take_side(num_generating, timeout)
        stack.callback(leave_side)
        bridge = Bridge(side, store, timeout)
        stack.callback(bridge.close)
        start_process_group(timeout)
        wire, layout = WeightWire(bridge), planned(side.num_training)
        group = torch.distributed.group.WORLD if side.num_training > 1 else None
        ways = receives(bridge, wire, layout) if side.generates else sends(
            bridge, wire, layout, group
        )  # fmt: skip
        seconds = [[], []]
        for number in range(NUM_ROUNDS + 1):
            for way, noted in zip(ways, seconds, strict=True):
                bridge.exchange_bytes([b"ready"] * world_size)
                begun = time.perf_counter()
                way()
                bridge.exchange_bytes([b"done"] * world_size)
                if number:
                    noted.append(time.perf_counter() - begun)
        return seconds


@pytest.mark.parametrize("num_training, num_generating", [(1, 1), (2, 1), (2, 2)])
def test_the_way_of_weights(num_training, num_generating):
    ranks = num_training + num_generating
    by_owners, by_the_first = run_multiprocess(
        program, ranks, timeout_seconds=280, args=(num_generating,)
    )[0]
    size = sum(a * b for a, b in SHAPES.values()) * DTYPE.itemsize / 1e9
    ratios = [old / new for new, old in zip(by_owners, by_the_first, strict=True)]
    new, old = statistics.median(by_owners), statistics.median(by_the_first)
    print(
        f"\n{num_training} + {num_generating} ranks, {size:.2f} GB: from owners {new:.3f} s "
        f"({size / new:.2f} GB/s), by the first {old:.3f} s ({size / old:.2f} GB/s), ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
