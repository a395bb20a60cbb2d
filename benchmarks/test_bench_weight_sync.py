"""A whole weight sync between two ranks and an engine, against three other ways to do it.

pytest benchmarks/test_bench_weight_sync.py -s

Two processes hold halves of every tensor in float32; each has an engine that needs all of it, in
bfloat16. Both engines store plain tensors, so what is measured is casting, packing, moving, loading
and checking. LIGHTRFT_BENCH_FULL=1 takes the whole layout of a 0.5B model and, given 100 GB of
memory, of a 7B model; without it the 0.5B layout has 6 of its 24 layers.
"""

from __future__ import annotations

import functools
import os
import statistics
import time

import harness
import psutil
import pytest
import torch
import torch.distributed as dist
from tests.engines.fake_engine import FakeEngine
from tests.ranks import run_multiprocess
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.engines import EngineConfig, WeightPiece
from lightrft.kernels import hash_tensors
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    module_parameter_source,
)
from lightrft.strategy.weight_sync.sync import WeightSync

NUM_ROUNDS = 7
BUCKET_BYTES = 64 * 2**20
IS_FULL = os.environ.get("LIGHTRFT_BENCH_FULL") == "1"
GIGABYTE = 1e9


def layer_shapes(hidden, kv, ffn):
    return [
        (hidden, hidden),
        (hidden,),
        (kv, hidden),
        (kv,),
        (kv, hidden),
        (kv,),
        (hidden, hidden),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
        (hidden,),
        (hidden,),
    ]


def shapes_of(layout):
    if layout == "1000 tensors":
        return [(64, 64)] * 1000
    if layout == "Qwen2.5-0.5B":
        layers = [s for _ in range(24 if IS_FULL else 6) for s in layer_shapes(896, 128, 4864)]
        return [(151936 if IS_FULL else 37984, 896), *layers, (896,)]
    layers = [s for _ in range(28) for s in layer_shapes(3584, 512, 18944)]
    return [(152064, 3584), *layers, (3584,), (152064, 3584)]


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


class World:
    """This rank's shards, and an engine that wants the whole tensors in bfloat16."""

    def __init__(self, shapes, rank, world_size):
        generator = torch.Generator().manual_seed(rank)
        self.entries, targets = [], {}
        for i, shape in enumerate(shapes):
            numel = torch.Size(shape).numel()
            shards = tuple(
                (numel * r // world_size, numel * (r + 1) // world_size) for r in range(world_size)
            )
            size = shards[rank][1] - shards[rank][0]
            local = torch.empty(size).uniform_(-1, 1, generator=generator)
            self.entries.append(SourceParameter(f"p{i}", shape, shards, local, frozen=False))
            targets[f"p{i}"] = torch.zeros(shape, dtype=torch.bfloat16)
        self.world_size = world_size
        self.source = ParameterSource(nn.Linear(1, 1), tuple(self.entries), dist.group.WORLD)
        self.engine = FakeEngine(EngineConfig("fake", ""), parameters=targets)
        self.num_bytes = sum(t.numel() * t.element_size() for t in targets.values())
        self.flat = torch.empty(BUCKET_BYTES // world_size, dtype=torch.uint8)
        self.gathered = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
        self.syncs = {
            verify: WeightSync(self.engine, bucket_bytes=BUCKET_BYTES, verify=verify)
            for verify in (True, False)
        }

    def ours(self, *, verify):
        self.syncs[verify].sync(self.source)

    def per_parameter(self):
        """Gather, cast and load one tensor after the other, as full_tensor() loops do."""
        self.engine.begin_weight_update()
        for entry in self.entries:
            full = torch.empty(entry.numel)
            dist.all_gather_into_tensor(full, entry.local_shard)
            piece = WeightPiece(entry.checkpoint_name, entry.shape, 0, full.bfloat16())
            self.engine.load_weights([piece])
        self.engine.finish_weight_update()
        self.engine.reset_caches()

    def cat_buckets(self):
        """Cast every shard, torch.cat them up to a bucket, gather it, load views of it."""
        self.engine.begin_weight_update()
        group, group_bytes = [], 0
        for entry in self.entries:
            size = 2 * entry.local_shard.numel()
            if group and group_bytes + size > BUCKET_BYTES // self.world_size:
                self._gather_cat(group)
                group, group_bytes = [], 0
            group.append(entry)
            group_bytes += size
        self._gather_cat(group)
        self.engine.finish_weight_update()
        self.engine.reset_caches()

    def _gather_cat(self, group):
        packed = torch.cat([entry.local_shard.bfloat16() for entry in group])
        full = torch.empty(packed.numel() * self.world_size, dtype=packed.dtype)
        dist.all_gather_into_tensor(full, packed)
        parts = full.view(self.world_size, -1)
        pieces, position = [], 0
        for entry in group:
            stop = position + entry.local_shard.numel()
            whole = parts[:, position:stop].reshape(-1)
            pieces.append(WeightPiece(entry.checkpoint_name, entry.shape, 0, whole))
            position = stop
        self.engine.load_weights(pieces)

    def floor(self):
        """The same bytes in full buckets of memory that is packed already; nothing is loaded."""
        left = self.num_bytes
        while left > 0:
            part = min(left, BUCKET_BYTES) // self.world_size
            dist.all_gather_into_tensor(self.gathered[: part * self.world_size], self.flat[:part])
            left -= BUCKET_BYTES


def measure(rank, world_size, layout):
    """Seconds of every round, bytes and collectives of each way; ranks take turns in step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    world = World(shapes_of(layout), rank, world_size)
    ways = {
        "floor": world.floor,
        "ours": functools.partial(world.ours, verify=False),
        "ours, verified": functools.partial(world.ours, verify=True),
        "per parameter": world.per_parameter,
        "torch.cat buckets": world.cat_buckets,
    }
    collectives = {}
    for name, run in ways.items():
        with Collectives() as seen:
            run()
        collectives[name] = seen.count
    reference = {n: t.clone() for n, t in world.engine.weights.tensors.items()}
    world.ours(verify=True)
    for name, tensor in world.engine.weights.tensors.items():
        assert torch.equal(tensor, reference[name]), name
    seconds, cpu_seconds = {name: [] for name in ways}, {name: [] for name in ways}
    for _ in range(NUM_ROUNDS):
        for name, run in ways.items():
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            cpu_seconds[name].append(time.process_time() - cpu_start)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return world.num_bytes, len(world.entries), collectives, seconds, cpu_seconds


@pytest.mark.parametrize("layout", ["1000 tensors", "Qwen2.5-0.5B", "Qwen2.5-7B"])
def test_weight_sync(benchmark, layout):
    if layout == "Qwen2.5-7B" and not (IS_FULL and psutil.virtual_memory().available > 100e9):
        pytest.skip("7B needs LIGHTRFT_BENCH_FULL=1 and 100 GB of memory for two ranks")
    found = run_multiprocess(measure, 2, timeout_seconds=1500, args=(layout,))
    num_bytes, num_tensors, collectives, seconds, cpu_seconds = found[0]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"\n{layout}{'' if IS_FULL or layout != 'Qwen2.5-0.5B' else ' (6 layers, 1/4 vocabulary)'}"
        f": {num_tensors} tensors, {num_bytes / 1e6:.0f} MB in bfloat16, 2 gloo ranks, buckets of "
        f"{BUCKET_BYTES // 2**20} MB, load {os.getloadavg()[0]:.1f}"
    )
    table = {}
    for name, median in medians.items():
        table[name] = {
            "seconds": median,
            "cpu_seconds": statistics.median(cpu_seconds[name]),
            "gb_per_second": num_bytes / median / GIGABYTE,
            "collectives": collectives[name],
            "times_floor": median / medians["floor"],
            "rounds": seconds[name],
        }
        print(
            f"  {name:<18} {median * 1e3:9.1f} ms  "
            f"{table[name]['cpu_seconds'] * 1e3:8.1f} ms of CPU  "
            f"{table[name]['gb_per_second']:6.2f} GB/s  "
            f"{collectives[name]:5d} collectives  {table[name]['times_floor']:6.2f} x floor"
        )
    ratio = medians["per parameter"] / medians["ours, verified"]
    verification = medians["ours, verified"] - medians["ours"]
    verified_ratio = statistics.median(
        a / b for a, b in zip(seconds["ours, verified"], seconds["ours"], strict=True)
    )
    print(
        f"  per parameter / ours, verified: {ratio:.1f}; verification: {verification * 1e3:.1f} ms"
        f"; verified / not verified: {verified_ratio:.2f}"
    )
    print("  vLLM's packed path: not run, it moves tensors by NCCL and needs GPUs")
    benchmark.extra_info.update(
        layout=layout,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        is_full=IS_FULL,
        ways=table,
        per_parameter_over_verified=ratio,
        verification_seconds=verification,
        verified_over_unverified=verified_ratio,
        vllm_packed="not run: it moves tensors by NCCL and needs GPUs",
    )
    benchmark.pedantic(lambda: None, rounds=1, iterations=1)
    if layout != "1000 tensors":
        return
    # Ranks that wait for a processor do not show what a message costs.
    if os.getloadavg()[0] > 2 * os.cpu_count():
        print(f"  not judged: the load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    else:
        assert ratio >= 3, f"expected at least 3 times the speed of one message per tensor: {ratio}"


def test_shared_storage(benchmark, device):
    """An engine that shares the trainer's storage: the sync of it is one hash of the weights."""
    if device.type != "cpu":
        pytest.skip("the embedded engine of this benchmark lies in host memory")
    layers = [s for _ in range(6) for s in layer_shapes(576, 192, 1536)]
    module = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in [(49152, 576), *layers]])
    names = [name for name, _ in module.named_parameters()]
    targets = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    engine = FakeEngine(EngineConfig("fake", ""), parameters=targets)
    source = module_parameter_source(module)
    syncs = {verify: WeightSync(engine, verify=verify) for verify in (True, False)}
    tensors = [p.detach() for p in module.parameters()]
    runs = {
        "floor: one hash": lambda: hash_tensors(tensors),
        "ours, verified": lambda: syncs[True].sync(source),
        "ours": lambda: syncs[False].sync(source),
        "two hashes": lambda: (hash_tensors(tensors), engine.hash_parameters(names)),
    }
    timings = harness.interleave(runs, device, 4.0)
    report = syncs[True].sync(source)
    assert report.num_aliased_bytes == sum(t.nbytes for t in tensors)
    floor = timings["floor: one hash"].median
    print(f"\nshared storage, {report.num_aliased_bytes / 1e6:.0f} MB in {len(names)} tensors")
    table = {}
    for name, timing in timings.items():
        table[name] = {"seconds": timing.median, "times_floor": timing.median / floor}
        print(f"  {name:<18} {timing.median * 1e3:9.1f} ms  {timing.median / floor:6.2f} x floor")
    benchmark.extra_info.update(num_bytes=report.num_aliased_bytes, ways=table)
    benchmark.pedantic(runs["ours"], rounds=1, iterations=1)
