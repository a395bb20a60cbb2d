"""Weight sync of models with expert stacks and with adapters; a fault in the adapter is found."""

import dataclasses

import pytest
import torch
from tests.engines.altered_engines import CopyingEngine, EditingEngine, embedded
from tests.engines.syncs import canary_of, failing
from tests.models.tiny import tiny_model

from lightrft.engines import EngineConfig
from lightrft.models import Actor
from lightrft.strategy.weight_sync.parameter_source import module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync

SMALL_BUCKET, LARGE_BUCKET = 20_000, 2**28


def moe_model(seed):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return tiny_model(
        "qwen3_moe", seed=seed, num_key_value_heads=2, tie_word_embeddings=False, **experts
    )


def dense_model(seed):
    return tiny_model(seed=seed, num_key_value_heads=2, tie_word_embeddings=True)


def engine_for(model, dtype="float32"):
    return CopyingEngine(EngineConfig("hf", "", dtype=dtype), module=model)


@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKET, LARGE_BUCKET])
def test_expert_stacks_arrive_whole_and_split_over_buckets(bucket_bytes):
    actor = Actor(moe_model(0))
    stacks = {n: p for n, p in actor.model.named_parameters() if p.dim() == 3}
    assert stacks, "transformers keeps the experts of a layer in one stack"
    largest = max(p.numel() * 4 for p in stacks.values())
    assert (largest > bucket_bytes) == (bucket_bytes == SMALL_BUCKET)
    engine = engine_for(moe_model(9))
    report = WeightSync(engine, bucket_bytes=bucket_bytes).sync(
        module_parameter_source(actor), canary=canary_of(actor)
    )
    held = dict(engine.native.named_parameters())
    for name, parameter in actor.model.named_parameters():
        assert torch.equal(held[name], parameter), name
    assert report.num_unverifiable_bytes == 0
    assert report.canary_difference < 1e-4
    assert report.num_buckets == -(-report.num_bytes // bucket_bytes)


def test_two_experts_exchanged_in_the_engine_are_found_by_the_hash():
    actor = Actor(moe_model(0))

    class ExchangesExpertsEngine(EditingEngine):
        def edit(self, piece):
            if len(piece.shape) != 3:
                return [piece]
            flipped = piece.tensor.view(piece.shape).flip(0).reshape(-1)
            return [dataclasses.replace(piece, tensor=flipped)]

    engine = embedded(moe_model(9), ExchangesExpertsEngine)
    with failing("hash") as caught:
        WeightSync(engine).sync(module_parameter_source(actor), canary=canary_of(actor))
    assert all("experts" in name for name in caught.value.names)


class Adapter:
    """A low-rank update of one projection: in the actor's forward, and added to what is sent."""

    def __init__(self, actor, name, rank=2):
        generator = torch.Generator().manual_seed(3)
        layer = actor.model.get_submodule(name)
        self.name = f"{name}.weight"
        self.down = torch.randn(rank, layer.in_features, generator=generator)
        self.up = torch.randn(layer.out_features, rank, generator=generator)
        layer.register_forward_hook(
            lambda module, inputs, output: output + inputs[0] @ self.down.T @ self.up.T
        )

    def add_local(self, name, start, values):
        if name == self.name:
            delta = (self.up @ self.down).reshape(-1)
            values += delta[start : start + values.numel()]


def adapted(adapter_name=None):
    """An actor with an adapter and its source; the source may know it under another name."""
    actor = Actor(dense_model(0))
    adapter = Adapter(actor, "model.layers.1.self_attn.q_proj")
    adapter.name = adapter_name or adapter.name
    source = dataclasses.replace(module_parameter_source(actor), add_local=adapter.add_local)
    return actor, adapter, source


def test_an_adapter_that_binds_to_nothing_is_found_by_the_canary():
    """Its names keep a prefix that no parameter has: what is sent lacks it, and so does the hash
    of what is to be sent; only the actor computes with it."""
    actor, _, source = adapted("base_model.model.layers.1.self_attn.q_proj.weight")
    engine = engine_for(dense_model(9))
    with failing("canary"):
        WeightSync(engine).sync(source, canary=canary_of(actor))
