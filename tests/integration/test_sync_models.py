"""Weight sync of models with expert stacks."""

import pytest
import torch
from tests.engines.altered_engines import CopyingEngine
from tests.engines.syncs import canary_of
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
