"""Adapters in the real vLLM: written into its buffers, hashed there, and faults that are found."""

import pytest
import torch
from tests.engines.syncs import failing
from tests.engines.vllm_adapters import (
    actor_at,
    answers,
    old_base,
    plain_products,
    require_equal_answers,
    vllm_of,
)
from tests.models.batches import draw_second_factors
from tests.strategy.test_adapter_sync import (
    doubled_scale,
    engine_of,
    synced,
    zero_adapter,
)

from lightrft.engines import EngineConfig
from lightrft.engines.base import StaleEngineError
from lightrft.strategy.weight_sync.sync import WeightSync

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    actor = actor_at(folder)
    with plain_products():
        engine = vllm_of(actor, folder)
    yield actor, engine, WeightSync(engine)
    engine.close()


def test_the_factors_alone_are_written_and_the_policy_is_the_trainer_s(world):
    actor, engine, sync = world
    embedded = engine_of(actor)
    for seed in (6, 7):
        draw_second_factors(actor, seed=seed)
        report = synced(actor, sync)
        synced(actor, WeightSync(embedded))
        factors = [p for n, p in actor.named_parameters() if ".lora_" in n]
        assert report.num_bytes == sum(4 * p.numel() for p in factors)
        assert report.num_resident_bytes > report.num_bytes
        assert report.num_unverifiable_bytes == 0
        require_equal_answers(answers(engine), answers(embedded))
    assert engine.hash_parameters() == embedded.hash_parameters()


def gate_in_up(engine):
    """Factors of the gate lie in the buffers of the up projection, whose shapes are equal."""
    finish = engine.finish_weight_update

    def finishes():
        tensors = engine.weights.adapters.tensors
        for name, (tensor,) in tensors.items():
            if ".up_proj." in name:
                tensor.copy_(*tensors[name.replace("up_proj", "gate_proj")])
        finish()

    engine.finish_weight_update = finishes


def stale_prefix_cache(engine):
    """vLLM keeps keys and values of the adapters before, under the same name."""
    answers(engine)
    engine.drop_caches = lambda: None


@pytest.mark.parametrize(
    "plant, check, name",
    [
        (zero_adapter, "hash", "lora_A"),
        (doubled_scale, "hash", "lora_B"),
        (gate_in_up, "hash", "up_proj.lora_A"),
        (stale_prefix_cache, "caches", "activations of earlier weights"),
        (old_base, "hash", "layers.0.mlp.down_proj.weight"),
    ],
)
def test_what_arrives_wrong_is_found(world, plant, check, name):
    actor, engine, sync = world
    draw_second_factors(actor, seed=6)
    synced(actor, sync)
    draw_second_factors(actor, seed=7, size=0.4)
    before = dict(vars(engine))
    plant(engine)
    with failing(check, name):
        synced(actor, sync)
    with pytest.raises(StaleEngineError):
        answers(engine)
    for planted in vars(engine).keys() - before:
        delattr(engine, planted)
    if plant is old_base:
        engine.weights.modules["model.layers.0.mlp.down_proj"].weight.data[0, 0] -= 1e-3
    synced(actor, sync)


@pytest.mark.parametrize("times", [0, 2])
def test_adapters_that_are_held_and_not_applied_once_are_found(world, times, monkeypatch):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    actor, _, sync = world
    add = PunicaWrapperCPU.add_lora_linear

    def adds(self, output, *args, **options):
        for _ in range(times):
            add(self, output, *args, **options)

    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", adds)
    draw_second_factors(actor, size=0.02)
    with failing("canary", "the engine shows|score the canary"):
        synced(actor, sync)


def test_sleep_keeps_the_adapters_and_the_base(world):
    actor, engine, sync = world
    draw_second_factors(actor, seed=8)
    synced(actor, sync)
    expected = answers(engine)
    engine.sleep(1)
    engine.wake_up()
    sync.check_resident()
    require_equal_answers(answers(engine), expected)
    old_base(engine)
    sync.check_resident()
    with pytest.raises(StaleEngineError, match=r"while it slept: .*layers.0.mlp.down_proj"):
        answers(engine)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"adapters": 513}, "adapters of rank 513"),
        ({"tensor_parallel_size": 2}, "engine_tp_size 2"),
        ({"model_path": ""}, "no checkpoint to read the base from"),
    ],
)
def test_what_vllm_cannot_hold_is_refused_by_name(changes, message):
    from lightrft.engines.types import AdapterShape
    from lightrft.engines.vllm.adapters import adapter_arguments

    shape = AdapterShape(changes.pop("adapters", 4), ("a",))
    given = {"engine_type": "vllm", "model_path": "here", "adapters": shape, **changes}
    with pytest.raises(ValueError, match=f"{message}.*lora_sync merged"):
        adapter_arguments(EngineConfig(**given))


def test_in_bfloat16_parity_is_better_than_with_merged_weights(tmp_path):
    actor = actor_at(tmp_path, torch.bfloat16, lora_alpha=16.0)
    rows = torch.randint(3, 130, (16, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = actor(rows, torch.ones_like(rows)).logprobs[:, 1:].float()
    found = {}
    for is_merged in (False, True):
        engine = vllm_of(actor, tmp_path, "bfloat16", is_merged=is_merged)
        synced(actor, WeightSync(engine), is_merged=is_merged, dtype=torch.bfloat16)
        scores = torch.tensor([engine.score(row)[1:] for row in rows.tolist()])
        found[is_merged] = float((scores - expected).abs().mean())
        engine.close()
    assert found[False] < found[True], found
