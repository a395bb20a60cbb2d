"""Several ranks: the engine of every rank must hold the full weights of a sharded trainer."""

import itertools
import math
from datetime import timedelta

import pytest
import torch
from tests.engines.syncs import canary_of
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import OddShapes
from torch import nn

pytestmark = pytest.mark.shard("strategies")


def tiny_actor(*, is_tied=False):
    from lightrft.models import Actor

    actor = Actor(tiny_model(tie_word_embeddings=is_tied))
    actor.model.model.layers[0].mlp.requires_grad_(False)
    return actor


def loss_of(actor, rank):
    tokens = torch.arange(12).view(1, 12) + rank
    return -actor(tokens, torch.ones_like(tokens)).logprobs.mean()


def optimizer_of(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)


def check_ranges(source, full, rank):
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


def check_fake_engine(source, full):
    """Odd shapes reach a scripted engine whole, in buckets of 64 bytes and in one."""
    from tests.engines.fake_engine import FakeEngine

    from lightrft.strategy.weight_sync.sync import WeightSync

    for bucket_bytes in (64, 2**20):
        engine = FakeEngine(
            parameters={name: torch.zeros_like(tensor) for name, tensor in full.items()}
        )
        WeightSync(engine, bucket_bytes=bucket_bytes).sync(source)
        for name, tensor in full.items():
            # Private: a fake engine shows to nobody else what it was given.
            assert torch.equal(engine.weights.tensors[name], tensor), name


def check_hf_engine(make_source, actor, wrapped, gather, step, *, is_tied):
    """Syncs before and after a training step, in two dtypes and bucket sizes.

    Returns:
        For each sync: version, bytes, hash of the engine.
    """
    from lightrft.engines import EngineConfig
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.strategy.weight_sync.sync import WeightSync

    syncs = []
    for dtype, bucket_bytes in ((torch.float32, 256 * 2**20), (torch.bfloat16, 30_000)):
        config = EngineConfig(
            engine_type="hf", model_path="", dtype=str(dtype).removeprefix("torch.")
        )
        engine = HFEngine(config, module=tiny_model(tie_word_embeddings=is_tied, seed=99))
        sync = WeightSync(engine, bucket_bytes=bucket_bytes)
        syncs.append((engine, sync, dtype, bucket_bytes))
    results = []
    for round_index in range(2):
        if round_index == 1:
            step()
        full = gather()
        for engine, sync, dtype, bucket_bytes in syncs:
            canary = canary_of(actor, wrapped, dtypes=[torch.float32, dtype])
            source = make_source()
            report = sync.sync(source, canary=canary)
            stored = dict(engine.native.named_parameters())
            assert set(stored) == set(full)
            for name, tensor in full.items():
                assert torch.equal(stored[name], tensor.to(dtype)), name
            is_sharded = source.group is not None
            # Without shards and with equal dtypes nothing is copied; ZeRO-3 always copies.
            can_share = source.entries[0].is_aliasable and dtype == torch.float32
            assert report.is_aliased == can_share
            assert (report.num_payload_collectives > 0) == is_sharded
            if bucket_bytes > 2**20:
                # One gathering bucket; nothing here is held by a single rank.
                assert report.is_aliased or report.num_buckets == 1
                assert report.num_payload_collectives <= 1
            else:
                # Two neighbouring buckets always exceed one bucket's size.
                assert (
                    report.num_payload_collectives
                    <= 2 * math.ceil(report.num_bytes / bucket_bytes) + 1
                )
            num_bytes = sum(t.numel() * dtype.itemsize for t in full.values())
            num_frozen = sum(
                t.numel() * dtype.itemsize
                for name, t in full.items()
                if name.startswith("model.layers.0.mlp.")
            )
            if not report.is_aliased:
                assert report.num_bytes == num_bytes - (num_frozen if round_index else 0)
            assert report.num_verified_bytes == num_bytes
            assert report.weights_version == round_index
            results.append((report.weights_version, str(dtype), report.engine_hash))
    return results


def fsdp2_rank(rank, world_size):
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
    results = []
    for is_tied, used_mesh in ((True, mesh), (False, mesh), (True, alone)):
        actor = tiny_actor(is_tied=is_tied)
        for layer in actor.model.model.layers:
            fully_shard(layer, mesh=used_mesh)
        fully_shard(actor, mesh=used_mesh)
        optimizer = optimizer_of(actor)

        def gather(actor=actor):
            return {n: p.detach().full_tensor() for n, p in actor.model.named_parameters()}

        def step(actor=actor, optimizer=optimizer, used_mesh=used_mesh):
            # Ranks that shard alone are replicas: they must see the same tokens.
            loss_of(actor, rank if used_mesh is mesh else 0).backward()
            optimizer.step()

        results += check_hf_engine(
            lambda actor=actor: fsdp2_parameter_source(actor),
            actor,
            actor,
            gather,
            step,
            is_tied=is_tied,
        )
    return {"ranges": ranges, "results": results}


def zero_rank(rank, world_size, stages):
    import deepspeed
    import torch.distributed as dist

    from lightrft.strategy.deepspeed import runtime
    from lightrft.strategy.deepspeed.weights import zero_parameter_source

    dist.init_process_group("gloo")
    runtime.start(timedelta(minutes=2))

    def start(module, stage):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 6},
        }
        return deepspeed.initialize(model=module, optimizer=optimizer_of(module), config=config)[0]

    def gathered(module):
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {name: p.detach().clone() for name, p in module.named_parameters()}

    ranges = {}
    results = []
    for stage in stages:
        engine = start(OddShapes(), stage)
        engine.backward(engine(torch.tensor(float(rank + 1))))
        engine.step()
        full = gathered(engine.module)
        assert not torch.equal(full["odd"], OddShapes().odd)
        source = zero_parameter_source(engine)
        ranges[stage] = check_ranges(source, full, rank)
        check_fake_engine(source, full)
        actor = tiny_actor(is_tied=stage == 2)
        engine = start(actor, stage)

        def step(engine=engine):
            engine.backward(loss_of(engine, rank))
            engine.step()

        results += check_hf_engine(
            lambda engine=engine: zero_parameter_source(engine),
            actor,
            engine,
            lambda actor=actor: gathered(actor.model),
            step,
            is_tied=stage == 2,
        )
    return {"ranges": ranges, "results": results}


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_fsdp2_weights_reach_every_ranks_engine(world_size):
    ranks = run_multiprocess(fsdp2_rank, world_size, timeout_seconds=240)
    assert all(found == ranks[0] for found in ranks)
    if world_size == 3:
        assert ranks[0]["ranges"]["odd"] == ((0, 9), (9, 18), (18, 21))
        assert ranks[0]["ranges"]["one_row"] == ((0, 5), (5, 5), (5, 5))


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "world_size, stages",
    [
        (2, (2, 3)),
        pytest.param(2, (0, 1), marks=pytest.mark.slow),
        pytest.param(1, (1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_zero_weights_of_every_stage_reach_every_ranks_engine(world_size, stages):
    ranks = run_multiprocess(zero_rank, world_size, timeout_seconds=270, args=(stages,))
    assert all(found == ranks[0] for found in ranks)
    if stages == (2, 3):
        assert ranks[0]["ranges"][2]["odd"] == ((0, 21),)
        assert ranks[0]["ranges"][3]["odd"] == ((0, 11), (11, 21))
        assert ranks[0]["ranges"][3]["one_row"] == ((0, 3), (3, 5))
