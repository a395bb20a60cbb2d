"""Weights on the way to an engine on a GPU: the real code on tensors without memory.

Buckets, transfer and adapters run on FakeTensors of device cuda in a process group that moves
nothing. What needs a driver (streams, pinned memory, the compiled kernel) is recorded.
"""

from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.engines.types import EngineParameter
from lightrft.kernels import BucketLayout, TensorSpec
from lightrft.kernels.weight_bucket import native
from lightrft.models.lora import BASE, FIRST, SECOND, LoraActor
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, SourceParameter
from lightrft.strategy.weight_sync.sync import Transfer, load_buckets
from lightrft.strategy.weight_sync.verification import PlannedParameter

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


class RecordedGPU:
    """Streams and kernel launches, in the order in which they were asked for."""

    device_tile_elements = 2048
    has_cuda = True

    def __init__(self, monkeypatch):
        self.events, self.on = [], "consumer"
        monkeypatch.setattr(native, "load_extension", lambda: self)
        monkeypatch.setattr(native, "can_run", lambda moves: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("filler"))
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream(self.on))
        plain = torch.empty

        def empty(*shape, pin_memory=False, **options):
            return plain(*shape, **options)

        monkeypatch.setattr(torch, "empty", empty)

    def stream(self, name):
        def wait_stream(other):
            self.events.append((name, "waits for", other.name))

        return SimpleNamespace(name=name, wait_stream=wait_stream, cuda_stream=len(name))

    @contextmanager
    def entered(self, stream):
        self.on = stream.name
        try:
            yield
        finally:
            self.on = "consumer"

    def launch_segments(self, table, num_segments, num_tiles, hashes, device, stream):
        assert stream == len(self.on)
        self.events.append((self.on, "launches", num_segments))


class OnlyCuda(TorchDispatchMode):
    """Notes what is computed from or to tensors of the host."""

    def __init__(self):
        super().__init__()
        self.on_host, self.num_calls = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
        self.num_calls += 1
        if any(t.device.type == "cpu" and t.dtype != torch.int64 for t in tensors):
            self.on_host.append(str(function))
        return found


@pytest.fixture
def world(monkeypatch):
    """Two ranks on GPUs, of which this is the first."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers "fake"

    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], backend="cpu:gloo,cuda:fake")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    gpu = RecordedGPU(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield group, gpu
    dist.destroy_process_group()


def entry(name, shape, *, dtype=torch.float32, is_whole=False):
    numel = torch.Size(shape).numel()
    shards = ((0, numel),) if is_whole else ((0, numel // 2), (numel // 2, numel))
    shard = torch.empty(shards[0][1], dtype=dtype, device=CUDA)
    return SourceParameter(name, shape, shards, shard, frozen=False)


class Engine:
    def __init__(self):
        self.pieces = []

    def load_weights(self, pieces):
        self.pieces += pieces


def transferred(source, gpu, *, dtype=torch.bfloat16, bucket_bytes=6000):
    """The real `load_buckets`; the engine's pieces, and what touched the host."""
    pairs = {
        e.checkpoint_name: PlannedParameter(
            EngineParameter(e.checkpoint_name, e.shape, dtype, verifiable=True), e
        )
        for e in source.entries
    }
    layout = BucketLayout.plan(
        [TensorSpec(e.checkpoint_name, e.shape, dtype, e.shards) for e in source.entries],
        bucket_bytes=bucket_bytes,
    )
    engine, transfer = Engine(), Transfer()
    with OnlyCuda() as watch:
        load_buckets(engine, layout, pairs, source, transfer)
    assert transfer.error is None
    assert watch.num_calls > 10
    return engine.pieces, layout, transfer, watch.on_host


def test_buckets_travel_from_gpu_to_gpu(world):
    group, gpu = world
    entries = (entry("a", (40, 50)), entry("b", (30, 20)), entry("norm", (64,), is_whole=True))
    source = ParameterSource(nn.Module(), entries, group)
    pieces, layout, transfer, on_host = transferred(source, gpu)
    assert on_host == []
    assert {piece.tensor.device for piece in pieces} == {CUDA}
    assert {piece.tensor.dtype for piece in pieces} == {torch.bfloat16}
    written = {e.checkpoint_name: 0 for e in entries}
    for piece in pieces:
        written[piece.name] += piece.tensor.numel()
    assert written == {"a": 2000, "b": 600, "norm": 64}
    num_moving = sum(bucket.kind != "local" for bucket in layout.buckets)
    assert transfer.num_payload_collectives == num_moving >= 1
    assert len(layout.buckets) == transfer.num_buckets >= 2
    check_order(gpu.events, layout)


def check_order(events, layout):
    """Each bucket is filled after its slot's last consumer, and consumed after it was filled."""
    fills = [i for i, event in enumerate(events) if event == ("filler", "waits for", "consumer")]
    uses = [i for i, event in enumerate(events) if event == ("consumer", "waits for", "filler")]
    assert len(fills) == len(layout.buckets)
    assert len(uses) == len(layout.buckets) + 1  # and once at the end
    assert all(fill < use for fill, use in zip(fills, uses, strict=False))
    launches = [i for i, event in enumerate(events) if event[1] == "launches"]
    assert launches
    assert all(events[i][0] == "filler" for i in launches)
    # With two slots the second bucket is filled before the first is used.
    assert fills[1] < uses[0]


def test_adapters_are_added_on_the_gpu(world):
    group, gpu = world
    rank, shape = 4, (40, 50)
    layer = "model.layers.0.q_proj"
    entries = (
        entry(f"{layer}{BASE}.weight", shape, dtype=torch.bfloat16),
        entry(f"{layer}{FIRST}", (rank, shape[1])),
        entry(f"{layer}{SECOND}", (shape[0], rank)),
        entry("model.norm.weight", (64,), is_whole=True),
    )
    adapted = SimpleNamespace(scale=2.0, pretrained=nn.Module())
    adapted.base_source = MethodType(LoraActor.base_source, adapted)
    with OnlyCuda() as watch:
        source = LoraActor.merged_source(adapted, ParameterSource(nn.Module(), entries, group))
    assert watch.on_host == []
    assert [e.checkpoint_name for e in source.entries] == [f"{layer}.weight", "model.norm.weight"]
    pieces, _, _, on_host = transferred(source, gpu)
    assert on_host == []
    assert {piece.tensor.device for piece in pieces} == {CUDA}
    assert sum(piece.tensor.numel() for piece in pieces) == 2000 + 64
