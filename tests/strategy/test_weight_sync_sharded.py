"""Several ranks: the engine of every rank must hold the full weights of a sharded trainer."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import OddShapes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.shard("strategies")

# Collectives that carry weights, and how many others a sync may have.
PAYLOAD = ("_allgather_base_", "broadcast_")
MOST_OTHER_COLLECTIVES = 4


class Collectives(TorchDispatchMode):
    """Names of the collectives that reach torch's process groups."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)


def check_ranges(source, full: dict[str, torch.Tensor], rank: int) -> dict[str, tuple]:
    """This rank's shards are the ranges that they claim to be; returns all ranges."""
    ranges = {}
    for entry in source.parameters():
        reference = full[entry.checkpoint_name]
        assert entry.shape == tuple(reference.shape)
        start, stop = entry.shards[rank if entry.is_sharded else 0]
        assert torch.equal(entry.local_shard, reference.reshape(-1)[start:stop])
        assert entry.frozen == (entry.checkpoint_name == "cube")
        bounds = [bound for bound in entry.shards if bound[1] > bound[0]]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert (bounds[0][0], bounds[-1][1]) == (0, reference.numel())
        ranges[entry.checkpoint_name] = entry.shards
    assert set(ranges) == set(full)
    return ranges


def check_fake_engine(source, full: dict[str, torch.Tensor]) -> None:
    """Odd shapes reach a scripted engine whole, in buckets of 64 bytes and in one."""
    from tests.engines.fake_engine import FakeEngine

    from lightrft.engines import EngineConfig
    from lightrft.strategy.weight_sync.sync import WeightSync

    for bucket_bytes in (64, 2**20):
        engine = FakeEngine(
            EngineConfig(engine_type="fake", model_path=""),
            parameters={name: torch.zeros_like(tensor) for name, tensor in full.items()},
        )
        with Collectives() as seen:
            report = WeightSync(engine, bucket_bytes=bucket_bytes).sync(source)
        for name, tensor in full.items():
            # Private: a fake engine shows to nobody else what it was given.
            assert torch.equal(engine.weights.tensors[name], tensor), name
        num_payload = sum(name.startswith(PAYLOAD) for name in seen.names)
        assert num_payload == report.num_payload_collectives
        assert len(seen.names) - num_payload <= MOST_OTHER_COLLECTIVES, seen.names
        if source.group is not None and bucket_bytes > 64:
            # As many as there are bytes, however many tensors these are of.
            assert num_payload <= len({entry.shards for entry in source.entries}), seen.names


def fsdp2_rank(rank: int, world_size: int) -> dict[str, object]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    from lightrft.strategy.fsdp2.sharding import fsdp2_parameter_source

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    replicated = nn.ParameterDict({"weight": distribute_tensor(torch.ones(2), mesh)})
    with pytest.raises(ValueError, match=r"Replicate.* for 'weight'"):
        fsdp2_parameter_source(replicated)
    odd = fully_shard(OddShapes(), mesh=mesh)
    optimizer = optimizer_of(odd)
    odd(torch.tensor(float(rank + 1))).backward()
    optimizer.step()
    full = {name: p.detach().full_tensor() for name, p in odd.named_parameters()}
    with torch.no_grad():
        odd(torch.tensor(1.0))
    # After a forward the root's registered parameters are gathered copies.
    assert not any(isinstance(p, DTensor) for p in odd.parameters())
    source = fsdp2_parameter_source(odd)
    ranges = check_ranges(source, full, rank)
    check_fake_engine(source, full)
    if world_size % 2 == 0:
        grid = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        hybrid = OddShapes()
        full = {name: p.detach().clone() for name, p in hybrid.named_parameters()}
        fully_shard(hybrid, mesh=grid)
        source = fsdp2_parameter_source(hybrid)
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert dist.get_process_group_ranks(source.group) == pair
        check_ranges(source, full, rank % 2)
        check_fake_engine(source, full)
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("others", "shard"))["shard"]
    replica = OddShapes()
    full = {name: p.detach().clone() for name, p in replica.named_parameters()}
    fully_shard(replica, mesh=alone)
    source = fsdp2_parameter_source(replica)
    assert source.group is None
    assert all(entry.is_aliasable for entry in source.entries)
    check_ranges(source, full, 0)
    check_fake_engine(source, full)
    return {"ranges": ranges}


def zero_rank(rank: int, world_size: int, stages: tuple[int, ...]) -> dict[str, object]:
    import deepspeed
    import torch.distributed as dist

    from lightrft.strategy.deepspeed import runtime
    from lightrft.strategy.deepspeed.weights import zero_parameter_source

    dist.init_process_group("gloo")
    runtime.start(timedelta(minutes=2))

    def start(module: nn.Module, stage: int):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 6},
        }
        return deepspeed.initialize(model=module, optimizer=optimizer_of(module), config=config)[0]

    def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {name: p.detach().clone() for name, p in module.named_parameters()}

    ranges = {}
    for stage in stages:
        engine = start(OddShapes(), stage)
        engine.backward(engine(torch.tensor(float(rank + 1))))
        engine.step()
        full = gathered(engine.module)
        assert not torch.equal(full["odd"], OddShapes().odd)
        source = zero_parameter_source(engine)
        ranges[stage] = check_ranges(source, full, rank)
        check_fake_engine(source, full)
    return {"ranges": ranges}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_fsdp2_weights_reach_every_ranks_engine(world_size: int) -> None:
    ranks = run_multiprocess(fsdp2_rank, world_size, timeout_seconds=240)
    assert all(found == ranks[0] for found in ranks)
    if world_size == 3:
        assert ranks[0]["ranges"]["odd"] == ((0, 9), (9, 18), (18, 21))
        assert ranks[0]["ranges"]["one_row"] == ((0, 5), (5, 5), (5, 5))


@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("world_size", "stages"),
    [
        (2, (2, 3)),
        pytest.param(2, (0, 1), marks=pytest.mark.slow),
        pytest.param(1, (1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_zero_weights_of_every_stage_reach_every_ranks_engine(
    world_size: int, stages: tuple[int, ...]
) -> None:
    ranks = run_multiprocess(zero_rank, world_size, timeout_seconds=270, args=(stages,))
    assert all(found == ranks[0] for found in ranks)
    if stages == (2, 3):
        assert ranks[0]["ranges"][2]["odd"] == ((0, 21),)
        assert ranks[0]["ranges"][3]["odd"] == ((0, 11), (11, 21))
        assert ranks[0]["ranges"][3]["one_row"] == ((0, 3), (3, 5))
