"""How many messages a weight sync needs: as many as its bytes, however many tensors there are."""

import math

import torch
import torch.distributed as dist
from tests.engines.fake_engine import FakeEngine
from tests.ranks import run_multiprocess
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.strategy.weight_sync.parameter_source import ParameterSource, SourceParameter
from lightrft.strategy.weight_sync.sync import WeightSync

NUM_ROWS, NUM_COLUMNS = 32_000, 8  # 1 MB of float32, in however many tensors
BUCKET_BYTES = 200_704


class Collectives(TorchDispatchMode):
    """Records every collective that reaches torch's process groups."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def sharded_source(num_tensors, rank, world_size):
    torch.manual_seed(0)
    full = {f"p{i}": torch.randn(NUM_ROWS // num_tensors, NUM_COLUMNS) for i in range(num_tensors)}
    entries = []
    for name, tensor in full.items():
        numel = tensor.numel()
        shards = tuple(
            (numel * r // world_size, numel * (r + 1) // world_size) for r in range(world_size)
        )
        local = tensor.reshape(-1)[slice(*shards[rank])]
        entries.append(SourceParameter(name, tuple(tensor.shape), shards, local, frozen=False))
    return full, ParameterSource(nn.Linear(1, 1), tuple(entries), dist.group.WORLD)


def count_messages(rank, world_size):
    dist.init_process_group("gloo")
    counts = {}
    for num_tensors in (20, 200):
        full, source = sharded_source(num_tensors, rank, world_size)
        engine = FakeEngine(
            parameters={name: torch.zeros_like(tensor) for name, tensor in full.items()}
        )
        engine.calls.clear()
        with Collectives() as seen:
            report = WeightSync(engine, bucket_bytes=BUCKET_BYTES).sync(source)
        for name, tensor in full.items():
            # Private: a fake engine shows to nobody else what it was given.
            assert torch.equal(engine.weights.tensors[name], tensor), name
        payload = [name for name in seen.names if name.startswith("_allgather_base_")]
        calls = [name for name in engine.calls if name != "load_weights"]
        counts[num_tensors] = {
            "payload": len(payload),
            "reported": report.num_payload_collectives,
            "loads": engine.calls.count("load_weights"),
            "other collectives": [name for name in seen.names if name not in payload],
            "other calls": calls,
        }
    return counts


def test_messages_follow_bytes_not_tensors():
    counts = run_multiprocess(count_messages, 2, timeout_seconds=240)
    assert counts[0] == counts[1]
    few, many = counts[0][20], counts[0][200]
    assert few == many
    padded_bytes = NUM_ROWS * NUM_COLUMNS * 4
    assert few["payload"] == few["reported"] <= math.ceil(padded_bytes / BUCKET_BYTES)
    assert few["loads"] == few["payload"]
    assert len(few["other collectives"]) + len(few["other calls"]) <= 8
