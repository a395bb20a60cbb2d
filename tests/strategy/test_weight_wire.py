"""Weights of ranks that only generate: every shard from its owner, proved, by any way."""

import os
import re
import signal
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tests.ranks import RankFailure, run_multiprocess

from lightrft.kernels import BucketLayout, TensorSpec
from lightrft.kernels.weight_bucket.broadcaster import BucketPacker, Timeline
from lightrft.strategy.split import weight_wire
from lightrft.strategy.split.bridge import Bridge
from lightrft.strategy.split.weight_wire import Route, WeightWire, wire_backend
from lightrft.strategy.weight_sync.verification import WeightSyncError

NUM_TRAINING, NUM_GENERATING, BUCKET_BYTES = 2, 2, 4096
SHAPES = {"embed": (37, 16), "up": (64, 24), "bias": (5,), "one_row": (1, 33), "head": (37, 16)}


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def source_of(version, rank, group):
    """Rows divided over the ranks that train; "bias" is whole on each, "one_row" on the first."""
    from torch import nn

    from lightrft.strategy.weight_sync.parameter_source import (
        ParameterSource,
        SourceParameter,
        chunk_ranges,
        whole_parameter,
    )

    entries = []
    for name, tensor in weights(version).items():
        if name == "bias":
            entries.append(whole_parameter(name, nn.Parameter(tensor)))
            continue
        shards = chunk_ranges(tuple(tensor.shape), NUM_TRAINING)
        shard = tensor.reshape(-1)[slice(*shards[rank])]
        entries.append(SourceParameter(name, tuple(tensor.shape), shards, shard, frozen=False))
    return ParameterSource(OWNER, tuple(entries), group)


OWNER = torch.nn.Module()


class HostTimeline(Timeline):
    """What a planted GPU has: nothing waits, and every wait of the host is counted."""

    num_waits = 0

    def __init__(self, device):
        super().__init__(torch.device("cpu"))

    def mark(self):
        def wait():
            HostTimeline.num_waits += 1

        return wait


class Memory:
    """Stands for `torch.empty` on a machine with a GPU; writes down what is asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, size, *, dtype, device="cpu", pin_memory=False):
        self.asked.append((torch.device(device).type, pin_memory))
        # Memory holds anything.
        return torch.full((size,), 171, dtype=dtype)


def wire_of(bridge, planted):
    """A wire on this machine, or on planted GPUs that two ranks share."""
    if not planted:
        return WeightWire(bridge), Memory()
    weight_wire.identity_of = lambda device: "one GPU"
    init = BucketPacker.__init__
    BucketPacker.__init__ = lambda self, layout, rank, device: init(
        self, layout, rank, torch.device("cpu")
    )
    memory = Memory()
    device = torch.device("cuda", 0)
    return WeightWire(bridge, device=device, allocate=memory, timeline=HostTimeline), memory


# --- faults: what each is on a rank


def flips_a_byte(patch):
    pack = BucketPacker.pack

    def flipped(self, bucket, out, *others):
        pack(self, bucket, out, *others)
        out[bucket.segments[0].byte_offset] ^= 1

    patch.setattr(BucketPacker, "pack", flipped)


def leaves_a_piece_out(patch):
    pack = BucketPacker.pack

    def left_out(self, bucket, *others):
        if bucket.segments[0].name != "up":
            pack(self, bucket, *others)

    patch.setattr(BucketPacker, "pack", left_out)


def sends_an_old_shard(patch):
    pack = BucketPacker.pack
    old = {p.checkpoint_name: p.local_shard for p in source_of(0, 1, None).parameters()}

    def stale(self, bucket, out, sources, *others):
        pack(self, bucket, out, lambda name: old[name] if name == "up" else sources(name), *others)

    patch.setattr(BucketPacker, "pack", stale)


def swaps_the_owners(patch):
    plan = Route.of
    patch.setattr(Route, "of", lambda bucket, owners, *sizes: plan(bucket, owners[::-1], *sizes))


def cannot_pack(patch):
    def fail(*_):
        raise ValueError("no memory left")

    patch.setattr(BucketPacker, "pack", fail)


# The ranks that have it, and what finds it.
FAULTS = {
    flips_a_byte: ([1], "hash"),
    leaves_a_piece_out: ([1], "hash"),
    sends_an_old_shard: ([1], "hash"),
    swaps_the_owners: ([0, 1, 2, 3], "hash"),
    cannot_pack: ([1], "no memory left"),
}


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def stands_still():
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_at_the_second_bucket(how):
    begin, calls = WeightWire._begin, []

    def lost(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            how()
        begin(self, *arguments)

    WeightWire._begin = lost


def open_ranks(stack, rank, seconds):
    """The side of this rank and the connection."""
    from lightrft.strategy.distributed.process_groups import leave_side, take_side

    timeout = timedelta(seconds=seconds)
    side, store = take_side(NUM_GENERATING, timeout)
    stack.callback(leave_side)
    bridge = Bridge(side, store, timeout)
    stack.callback(bridge.close)
    return side, bridge


def generate(bridge, engine, wire, plant):
    from lightrft.strategy.split.remote_engine import engine_handlers

    handlers = engine_handlers(engine, bridge, wire)
    # Before a sync begins.
    begin = handlers["begin"]
    handlers["begin"] = lambda: (plant(), begin())
    bridge.serve(handlers)


def sync_often(rank, world_size, planted, faults, seconds):
    """A sync, one with each fault, and one without; what this rank has come to."""
    from tests.engines.fake_engine import FakeEngine

    from lightrft.strategy.distributed.deadlines import phase
    from lightrft.strategy.distributed.process_groups import start_process_group
    from lightrft.strategy.split.bridge import END
    from lightrft.strategy.split.remote_engine import RemoteEngine
    from lightrft.strategy.weight_sync.sync import WeightSync

    patch, versions = pytest.MonkeyPatch(), iter([None, *faults, None])

    def plant():
        patch.undo()
        fault = next(versions)
        if fault in FAULTS_OF_NAME and rank in FAULTS[FAULTS_OF_NAME[fault]][0]:
            FAULTS_OF_NAME[fault](patch)
        elif fault is not None and fault.endswith(f"@{rank}"):
            lose_at_the_second_bucket(globals()[fault.partition("@")[0]])

    with ExitStack() as stack:
        side, bridge = open_ranks(stack, rank, seconds)
        wire, memory = wire_of(bridge, planted)
        if side.generates:
            engine = FakeEngine(
                parameters={name: torch.zeros(shape) for name, shape in SHAPES.items()}
            )
            generate(bridge, engine, wire, plant)
            held = {name: engine.weights.tensors[name].clone() for name in SHAPES}
            return held, memory.asked, bridge.take_received(), HostTimeline.num_waits
        start_process_group(timedelta(seconds=60))
        engine = RemoteEngine(bridge, "fake", wire)
        sync = WeightSync(engine, bucket_bytes=BUCKET_BYTES, allow_alias=False)
        group, texts = torch.distributed.group.WORLD, []
        for version in range(2 + len(faults)):
            plant()
            try:
                with phase("update the engine's weights", 120):
                    sync.sync(source_of(version, rank, group))
                texts.append("")
            except WeightSyncError as error:
                texts.append(str(error))
        bridge.send(END)
        return texts, memory.asked, 0, HostTimeline.num_waits


FAULTS_OF_NAME = {fault.__name__: fault for fault in FAULTS}


def run(*, planted=False, faults=(), seconds=60):
    ranks = NUM_TRAINING + NUM_GENERATING
    given = (planted, list(faults), seconds)
    return run_multiprocess(sync_often, ranks, timeout_seconds=120, args=given)


@pytest.mark.full
@pytest.mark.parametrize("planted", [False, True], ids=["CPU", "two ranks of one GPU"])
def test_two_ranks_bring_their_shards_to_two_engines_and_faults_are_found(planted):
    ranks = run(planted=planted, faults=FAULTS_OF_NAME)
    expected = weights(1 + len(FAULTS))
    for held, _, received, _ in ranks[NUM_TRAINING:]:
        for name, tensor in expected.items():
            assert torch.equal(held[name], tensor), name
        assert received > 4 * len(FAULTS) * sum(tensor.numel() for tensor in expected.values())
    for texts, *_ in ranks[:NUM_TRAINING]:
        assert (texts[0], texts[-1]) == ("", "")
        for fault, text in zip(FAULTS, texts[1:-1], strict=True):
            assert FAULTS[fault][1] in text, (fault, text)
    for _, asked, _, num_waits in ranks if planted else ():
        # Through the host only in pinned memory, allocated once for all syncs.
        assert [pinned for kind, pinned in asked if kind == "cpu"] == [True, True]
        assert num_waits > 0


@pytest.mark.full
@pytest.mark.parametrize("fault, seconds", [("dies@3", 60), ("dies@1", 60), ("stands_still@2", 4)])
def test_a_rank_that_is_lost_between_two_buckets_ends_the_others(fault, seconds, capfd):
    with pytest.raises(RankFailure) as failure:
        run(faults=[fault], seconds=seconds)
    text = str(failure.value) + "".join(capfd.readouterr())
    name, rank = fault.split("@")
    role = "generate" if int(rank) >= NUM_TRAINING else "train"
    phase = r"in phase ['\"](update the engine's|receive the) weights['\"]"
    assert re.search(phase, text), text
    if name == "dies":
        assert re.search(rf"lost the ranks that {role} \([\d, ]*{rank}", text), text
    else:
        assert f"no sign of life for {seconds} s: rank {rank}, which {role}s" in text, text


@pytest.mark.parametrize(
    "gpus, backend",
    [
        (["a", "b", "c"], "nccl"),
        (["a", "b", "a"], "gloo"),
        (["a", "b", ""], "gloo"),
        (["", ""], "gloo"),
    ],
    ids=["a GPU each", "two ranks of one GPU", "one without", "CPUs"],
)
def test_the_way_follows_from_the_devices(gpus, backend):
    assert wire_backend(gpus) == backend


def test_from_gpu_to_gpu_nothing_stops_in_the_host():
    class Peers:
        side = type("Side", (), {"generates": False, "num_generating": 1, "num_training": 1})
        everyone, rank, world_size, opened = None, 0, 2, ()

        def exchange_bytes(self, parts):
            return [b"a", b"b"]

        def open_group(self, *arguments):
            self.opened = arguments

    memory, bridge = Memory(), Peers()
    weight_wire.identity_of, real = (lambda device: "a"), weight_wire.identity_of
    try:
        wire = WeightWire(bridge, device=torch.device("cuda", 0), allocate=memory)
        wire._slots(1024, 0)
    finally:
        weight_wire.identity_of = real
    assert bridge.opened == ("weights", 0, 2, "nccl")
    assert {kind for kind, _ in memory.asked} == {"cuda"}


def test_groups_of_gpus_wait_as_long_as_the_phase_and_are_given_up_at_the_end(monkeypatch):
    ended = []

    class Planted:
        class Options:
            pass

        def __init__(self, store, rank, size, options):
            assert (rank, size) == (1, 3)
            assert options._timeout > timedelta(days=1)

        def abort(self):
            ended.append(self)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Planted, raising=False)
    lifeline = SimpleNamespace(close=lambda: None)
    bridge = SimpleNamespace(_store=torch.distributed.HashStore(), _on_gpus=[], _lifeline=lifeline)
    group = Bridge.open_group(bridge, "weights", 1, 3, "nccl")
    Bridge.close(bridge)
    assert ended == [group]


def layout_of(kinds, num_ranks):
    specs = []
    for number, (kind, numel) in enumerate(kinds):
        shards = ((0, numel),)
        if kind != "local":
            bounds = [numel * i // num_ranks for i in range(num_ranks + 1)]
            if kind == "broadcast":
                bounds = [0] * 2 + [numel] * (num_ranks - 1)
            shards = tuple(pairwise(bounds))
        specs.append(TensorSpec(f"w{number}", (numel,), torch.bfloat16, shards))
    return BucketLayout.plan(specs, bucket_bytes=BUCKET_BYTES)


@pytest.mark.parametrize("num_generating", [1, 2, 3, 8])
@pytest.mark.parametrize("num_training", [1, 2, 3])
def test_every_byte_is_sent_once_and_received_once(num_training, num_generating):
    kinds = [("gather", 999), ("local", 5000), ("broadcast", 300), ("gather", 4001)]
    kinds = [k for k in kinds if num_training > 1 or k[0] == "local"]
    layout = layout_of(kinds, num_training)
    for bucket in layout.buckets:
        route = Route.of(bucket, range(num_training), num_training, num_generating)
        for ranges in (route.sent, route.received):
            covered = sorted(each for each in ranges if each[0] < each[1])
            assert covered[0][0] == 0
            assert covered[-1][1] == bucket.num_bytes
            assert all(a[1] == b[0] for a, b in pairwise(covered))
        table = [route.sizes_from(rank) for rank in range(num_training)]
        assert [route.sizes_to(rank) for rank in range(num_generating)] == [
            list(column) for column in zip(*table, strict=True)
        ]
        # A rank of another replica leaves the owners out and sends only what all hold.
        if bucket.kind != "local":
            other = Route.of(bucket, (), num_training, num_generating)
            assert other.sizes_from(0) == [0] * num_generating
