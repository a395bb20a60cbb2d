"""Faults planted at their own place; default settings must find each, by the check that can."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from tests.engines.altered_engines import CopyingEngine, EditingEngine, embedded
from tests.engines.syncs import canary_of, failing
from tests.models.tiny import WIDE, tiny_model
from tests.ranks import run_multiprocess
from torch.distributed.fsdp import fully_shard

from lightrft.engines import GenerationRequest, SamplingParams, StaleEngineError
from lightrft.engines.hf.engine import HFEngine
from lightrft.models import Actor
from lightrft.strategy.fake import FakeStrategy
from lightrft.strategy.fsdp2.sharding import fsdp2_parameter_source
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync, WeightSyncError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
REQUEST = GenerationRequest((5, 6, 7))


def square_model(*, seed=0):
    """As many key heads as query heads, so that q, k and o projections have one square shape."""
    shape = {**WIDE, "num_key_value_heads": 4, "vocab_size": 503, "tie_word_embeddings": True}
    return tiny_model(seed=seed, **shape)


def tiny_actor():
    return Actor(square_model())


def start(engine_class):
    return embedded(square_model(seed=99), engine_class)


def train_a_little(strategy, actor):
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.3)
    tokens = torch.arange(24).view(1, 24)
    loss = -actor(tokens, torch.ones_like(tokens)).logprobs.mean()
    strategy.backward(loss, actor, optimizer)
    strategy.optimizer_step(optimizer, actor, None)


class PrefixCachingEngine(CopyingEngine):
    """Keeps the first generated token of each prompt, as a prefix cache keeps its activations."""

    def __init__(self, config, *, module=None):
        super().__init__(config, module=module)
        self.cached = {}

    def poll(self):
        return [
            self.cached.setdefault(completion.prompt_token_ids, completion)
            for completion in super().poll()
        ]

    def reset_caches(self):
        super().reset_caches()
        self.cached.clear()


class ForgetsItsCacheEngine(PrefixCachingEngine):
    """Fault: the prefix cache outlives an update."""

    def reset_caches(self):
        HFEngine.reset_caches(self)


class NeverResetEngine(CopyingEngine):
    """Fault: the reset does not reach the engine."""

    def reset_caches(self):
        return


class SwapsPiecesEngine(EditingEngine):
    def edit(self, piece):
        swapped = {Q_PROJ: K_PROJ, K_PROJ: Q_PROJ}
        return [dataclasses.replace(piece, name=swapped.get(piece.name, piece.name))]


class TransposesPieceEngine(EditingEngine):
    def edit(self, piece):
        if piece.name != O_PROJ:
            return [piece]
        return [dataclasses.replace(piece, tensor=piece.tensor.view(128, 128).t().reshape(-1))]


class DropsPieceEngine(EditingEngine):
    def edit(self, piece):
        return [] if piece.name == O_PROJ else [piece]


class FlipsOneBitEngine(EditingEngine):
    def edit(self, piece):
        if piece.name == O_PROJ:
            piece.tensor.view(torch.int32)[77] ^= 1
        return [piece]


def sync(strategy, engine, actor):
    if strategy.inference_engine is not engine:
        strategy.inference_engine = engine
    report = strategy.update_engine_weights(actor)
    assert engine.generate([REQUEST], SamplingParams(max_tokens=1))
    return report


class PlantedSource(FakeStrategy):
    """A strategy that hands out its parameters wrongly once `fault` is set."""

    fault = None

    def parameter_source(self, model):
        source = super().parameter_source(model)
        if self.fault is None:
            return source
        return ParameterSource(
            source.owner, tuple(self.fault(source.entries)), None, source.tied_names
        )


def swap_names(entries):
    swapped = {Q_PROJ: K_PROJ, K_PROJ: Q_PROJ}
    return [
        dataclasses.replace(e, checkpoint_name=swapped.get(e.checkpoint_name, e.checkpoint_name))
        for e in entries
    ]


def transpose_square(entries):
    return [
        dataclasses.replace(e, local_shard=e.local_shard.view(128, 128).t().reshape(-1))
        if e.checkpoint_name == O_PROJ
        else e
        for e in entries
    ]


def rename_parameter(entries):
    return [
        dataclasses.replace(e, checkpoint_name="model.layers.0.self_attn.o.weight")
        if e.checkpoint_name == O_PROJ
        else e
        for e in entries
    ]


def drop_parameter(entries):
    return [entry for entry in entries if entry.checkpoint_name != O_PROJ]


@pytest.mark.parametrize("engine_class", [HFEngine, CopyingEngine, PrefixCachingEngine])
def test_without_a_fault_nothing_is_found(engine_class):
    actor = tiny_actor()
    with FakeStrategy() as strategy:
        engine = start(engine_class)
        for version in range(3):
            report = sync(strategy, engine, actor)
            assert report.weights_version == version
            assert report.is_aliased == (engine_class is HFEngine)
            is_known = report.is_aliased and version > 0
            assert (report.canary_difference is None) == is_known
            assert is_known or report.canary_difference < 2e-5
            train_a_little(strategy, actor)


@pytest.mark.parametrize(
    "engine_class, names",
    [
        (SwapsPiecesEngine, {Q_PROJ, K_PROJ}),
        (TransposesPieceEngine, {O_PROJ}),
        (DropsPieceEngine, {O_PROJ}),
        (FlipsOneBitEngine, {O_PROJ}),
    ],
)
def test_hashes_find_and_name_what_was_changed_on_the_way(engine_class, names):
    actor = tiny_actor()
    with FakeStrategy() as strategy:
        engine = start(engine_class)
        with failing("hash") as caught:
            sync(strategy, engine, actor)
    assert set(caught.value.names) == names
    assert engine.weights_version == -1
    with pytest.raises(StaleEngineError, match="must not generate"):
        engine.generate([REQUEST], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("engine_class", [HFEngine, CopyingEngine])
@pytest.mark.parametrize("fault", [swap_names, transpose_square])
def test_the_canary_finds_what_was_read_under_a_wrong_name_or_order(fault, engine_class):
    actor = tiny_actor()
    with PlantedSource() as strategy:
        engine = start(engine_class)
        sync(strategy, engine, actor)
        strategy.fault = fault
        with failing("canary"):
            sync(strategy, engine, actor)
        assert engine.weights_version == 0
        with pytest.raises(StaleEngineError, match="must not generate"):
            engine.generate([REQUEST], SamplingParams(max_tokens=1))
        strategy.fault = None
        assert sync(strategy, engine, actor).weights_version == 1


@pytest.mark.parametrize("engine_class", [HFEngine, CopyingEngine])
def test_the_canary_finds_a_source_that_training_left_behind(engine_class):
    actor = tiny_actor()
    with PlantedSource() as strategy:
        engine = start(engine_class)
        snapshot = [
            dataclasses.replace(entry, local_shard=entry.local_shard.clone())
            for entry in strategy.parameter_source(actor).parameters()
        ]
        strategy.fault = lambda entries: snapshot
        sync(strategy, engine, actor)
        train_a_little(strategy, actor)
        with failing("canary"):
            sync(strategy, engine, actor)


@pytest.mark.parametrize(
    "fault, names",
    [(drop_parameter, {O_PROJ}), (rename_parameter, {O_PROJ, "model.layers.0.self_attn.o.weight"})],
)
def test_accounting_finds_missing_parameters_before_anything_is_sent(fault, names):
    actor = tiny_actor()
    with PlantedSource() as strategy:
        engine = start(CopyingEngine)
        before = engine.hash_parameters()
        strategy.fault = fault
        with failing("accounting") as caught:
            sync(strategy, engine, actor)
        assert set(caught.value.names) == names
        assert engine.hash_parameters() == before


@pytest.mark.parametrize("engine_class", [ForgetsItsCacheEngine, NeverResetEngine])
def test_a_skipped_cache_reset_is_found(engine_class):
    actor = tiny_actor()
    with FakeStrategy() as strategy:
        engine = start(engine_class)
        with failing("caches"):
            sync(strategy, engine, actor)
            train_a_little(strategy, actor)
            sync(strategy, engine, actor)


def fault_on_one_rank(rank, world_size):
    dist.init_process_group("gloo")

    class RefusesSecondLoadEngine(CopyingEngine):
        num_loads = 0

        def load_weights(self, pieces):
            self.num_loads += 1
            if self.num_loads == 2:
                raise MemoryError("planted")
            super().load_weights(pieces)

    found = []

    def expect_failure(engine, source, canary=None):
        with pytest.raises(WeightSyncError) as caught:
            WeightSync(engine, bucket_bytes=50_000).sync(source, canary=canary)
        assert engine.weights_version == -1
        found.append((caught.value.check, str(caught.value)))

    actor = tiny_actor()
    sharded = tiny_actor()
    fully_shard(sharded)
    canary = canary_of(sharded)
    engines = [RefusesSecondLoadEngine, FlipsOneBitEngine, ForgetsItsCacheEngine]
    for engine_class in engines[:2]:
        engine = start(engine_class if rank == 1 else CopyingEngine)
        expect_failure(engine, fsdp2_parameter_source(sharded), canary)
    source = module_parameter_source(actor)
    if rank == 1:
        source = ParameterSource(source.owner, tuple(drop_parameter(source.entries)))
    expect_failure(start(CopyingEngine), source)
    if rank == 1:
        with torch.no_grad():
            actor.model.model.norm.weight[3] += 1
    # A replica that diverged: its own engine holds exactly its weights.
    expect_failure(start(HFEngine), module_parameter_source(actor))
    # What an engine shared by the replicas then holds is told second.
    expect_failure(start(FlipsOneBitEngine), module_parameter_source(actor))
    return found


@pytest.mark.full
def test_a_fault_on_one_rank_ends_the_sync_on_all():
    first, second = run_multiprocess(fault_on_one_rank, 2, timeout_seconds=240)
    checks = ["transfer", "hash", "accounting", "hash", "hash"]
    assert [check for check, _ in first] == checks
    assert [check for check, _ in second] == checks
    assert all("on rank 1" in message for _, message in first[:3])
    assert "MemoryError: planted" in first[0][1]
    assert O_PROJ in first[1][1]
    assert O_PROJ in first[2][1]
    assert "rank(s) [1] hold other weights than rank 0" in first[3][1] == second[3][1]
    assert first[3] == first[4] == second[4]
