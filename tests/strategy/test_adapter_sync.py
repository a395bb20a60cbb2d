"""Adapters alone in the engine: what travels, and which faults the default checks find."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.engines.syncs import canary_of, failing
from tests.engines.vllm_adapters import ALPHA, RANK
from tests.models.batches import draw_second_factors
from tests.models.tiny import tiny_model

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines import EngineConfig, GenerationRequest, SamplingParams
from lightrft.engines.adapters import SECOND
from lightrft.engines.base import StaleEngineError
from lightrft.engines.factory import EngineFacts
from lightrft.engines.hf.engine import HFEngine
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.weight_sync import parameter_source
from lightrft.strategy.weight_sync.canary import CANARY_LIMITS, check_effect
from lightrft.strategy.weight_sync.parameter_source import engine_source, module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync
from lightrft.strategy.weight_sync.verification import WeightSyncError

pytest.importorskip("peft", reason="package peft is not installed")

PROMPT = (5, 17, 60)


def lora_actor(dtype=torch.float32, **options):
    """With factors that have an effect."""
    from lightrft.models import LoraActor

    given = {"lora_rank": RANK, "lora_alpha": ALPHA, **options}
    actor = LoraActor(tiny_model().to(dtype), TrainConfig(**given))
    draw_second_factors(actor)
    return actor


def engine_of(actor, dtype="float32", *, is_merged=False):
    adapters = None if is_merged else actor.adapter_shape()
    return HFEngine(
        EngineConfig(engine_type="hf", model_path="", dtype=dtype, adapters=adapters),
        module=actor.model,
    )


def synced(actor, sync, *, is_merged=False, dtype=torch.float32):
    source = engine_source(actor, module_parameter_source(actor), has_adapters=not is_merged)
    canary = canary_of(actor, dtypes=(dtype,), has_adapters=not is_merged)
    return sync.sync(source, canary=canary)


def factors_of(engine):
    return {n: p for n, p in engine.native.named_parameters() if ".lora_" in n}


def test_only_the_factors_travel_and_the_scale_is_in_the_engine_s_b():
    actor = lora_actor()
    engine = engine_of(actor)
    sync = WeightSync(engine, allow_alias=False)
    first = synced(actor, sync)
    draw_second_factors(actor, seed=6)
    second = synced(actor, sync)
    factors = factors_of(engine)
    assert second.num_bytes == sum(4 * p.numel() for p in factors.values()) < first.num_bytes / 2
    assert second.num_resident_bytes == first.num_bytes - second.num_bytes
    assert second.num_verified_bytes == first.num_bytes
    assert second.engine_hash != first.engine_hash
    for name, parameter in actor.model.named_parameters():
        if ".lora_" in name:
            scale = ALPHA / RANK if ".lora_B." in name else 1.0
            assert torch.equal(factors[name.replace(".default", "")], parameter * scale)


def test_trainer_and_engine_hold_one_base():
    actor = lora_actor()
    engine = engine_of(actor)
    report = synced(actor, WeightSync(engine))
    held = dict(engine.native.named_parameters())
    frozen = {n: p for n, p in actor.model.named_parameters() if not p.requires_grad}
    assert report.num_bytes == sum(4 * p.numel() for p in factors_of(engine).values())
    assert report.num_aliased_bytes == sum(4 * p.numel() for p in frozen.values())
    for name, parameter in frozen.items():
        assert held[name.replace(".base_layer", "")].data_ptr() == parameter.data_ptr()
    engine.sleep(level=2)
    assert not any(factor.numel() for factor in factors_of(engine).values())
    engine.wake_up()
    assert synced(actor, WeightSync(engine)).num_bytes == report.num_bytes


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize("allow_alias", [True, False])
@torch.no_grad()
def test_a_write_into_the_trainers_base_is_found_at_each_further_sync(is_merged, allow_alias):
    actor = lora_actor()
    sync = WeightSync(engine_of(actor, is_merged=is_merged), allow_alias=allow_alias)
    for sync.verify in (False, True):
        synced(actor, sync, is_merged=is_merged)
    actor.model.model.layers[0].mlp.down_proj.weight[0, 0] += 1e-3
    for _ in range(2):
        with failing("hash", "1 frozen .* changed since .*layers.0.mlp.down_proj.*weight"):
            synced(actor, sync, is_merged=is_merged)
    sync.forget()
    synced(actor, sync, is_merged=is_merged)


def test_with_merged_weights_both_hold_what_has_no_adapter_once():
    actor = lora_actor()
    engine = engine_of(actor, is_merged=True)
    report = synced(actor, WeightSync(engine), is_merged=True)
    without = [n for n, _ in engine.native.named_parameters() if "proj" not in n]
    held, ours = engine.native.state_dict(), actor.model.state_dict()
    assert all(held[name].data_ptr() == ours[name].data_ptr() for name in without)
    assert report.num_aliased_bytes == sum(held[name].nbytes for name in without)


def test_engine_and_trainer_have_the_same_effective_policy():
    actor = lora_actor()
    engine, merged = engine_of(actor), engine_of(actor, is_merged=True)
    synced(actor, WeightSync(engine))
    synced(actor, WeightSync(merged), is_merged=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found, expected = (e.generate([GenerationRequest(PROMPT)], params)[0] for e in (engine, merged))
    assert found.output_token_ids == expected.output_token_ids
    assert found.output_logprobs == pytest.approx(expected.output_logprobs, abs=1e-4)


def mean_difference(actor, engine, rows):
    ids = torch.tensor(rows)
    with torch.no_grad():
        trainer = actor(ids, torch.ones_like(ids)).logprobs[:, 1:].float()
    found = torch.tensor([engine.score(row)[1:] for row in rows])
    return float((trainer - found).abs().mean())


def test_in_bfloat16_parity_is_better_than_with_merged_weights():
    # As a strategy has them: adapters in the weights' dtype.
    actor = lora_actor(torch.bfloat16, lora_alpha=16.0).to(torch.bfloat16)
    rows = torch.randint(1, 100, (16, 32), generator=torch.Generator().manual_seed(1)).tolist()
    found = {}
    for is_merged in (False, True):
        engine = engine_of(actor, "bfloat16", is_merged=is_merged)
        synced(actor, WeightSync(engine), is_merged=is_merged, dtype=torch.bfloat16)
        found[is_merged] = mean_difference(actor, engine, rows)
    # W + s B A rounds to bfloat16 what W x and s B (A x) keep apart; measured 0.07 of it.
    assert found[False] < 0.3 * found[True]


def scale_on_the_way(engine, part, factor):
    """Weights whose names have a part arrive multiplied."""
    load = engine.load_weights

    def loads(pieces):
        scaled = [
            type(piece)(piece.name, piece.shape, piece.start, piece.tensor * factor)
            if part in piece.name
            else piece
            for piece in pieces
        ]
        load(scaled)

    engine.load_weights = loads


def zero_adapter(engine):
    """Nothing of the factors arrives: they stay 0."""
    scale_on_the_way(engine, ".lora_", 0)


def doubled_scale(engine):
    """A loader folds the scale in that the sender has folded in."""
    scale_on_the_way(engine, SECOND, ALPHA / RANK)


def gate_in_up(engine):
    """Factors of the gate lie in the up projection, which has the same shape."""
    finish = engine.finish_weight_update

    def finishes():
        factors = factors_of(engine)
        for name, parameter in factors.items():
            if ".up_proj." in name:
                parameter.copy_(factors[name.replace("up_proj", "gate_proj")])
        finish()

    engine.finish_weight_update = finishes


def stale_cache(engine):
    """The engine's caches keep activations of the adapters before."""
    engine.reset_caches = lambda: None


def old_base(engine):
    """One base weight is not the trainer's."""
    finish = engine.finish_weight_update

    def finishes():
        engine.native.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1e-3
        finish()

    engine.finish_weight_update = finishes


@pytest.mark.parametrize(
    "plant, check, name",
    [
        (zero_adapter, "hash", "lora_A"),
        (doubled_scale, "hash", "lora_B"),
        (gate_in_up, "hash", "up_proj.lora_A"),
        (stale_cache, "caches", "reset_caches"),
        (old_base, "hash", "layers.0.mlp.down_proj.weight"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@torch.no_grad()
def test_what_arrives_wrong_is_found(plant, check, name, is_first):
    actor = lora_actor()
    engine = engine_of(actor)
    sync = WeightSync(engine, allow_alias=False)
    if not is_first:
        synced(actor, sync)
        draw_second_factors(actor, seed=6)
    plant(engine)
    with failing(check, name):
        synced(actor, sync)
    with pytest.raises(StaleEngineError):
        engine.generate([GenerationRequest(PROMPT)], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_that_are_held_and_not_applied_once_are_found(times, dtype, monkeypatch):
    """Hashes are right then, and limits for bfloat16 let the logprobs pass."""
    from lightrft.engines import adapters

    add = adapters.add_adapter
    monkeypatch.setattr(
        adapters,
        "add_adapter",
        lambda layer, inputs, output: output + times * (add(layer, inputs, output) - output),
    )
    actor = lora_actor(getattr(torch, dtype)).to(getattr(torch, dtype))
    draw_second_factors(actor, size=0.02)
    with failing("canary", "the engine shows|score the canary"):
        synced(actor, WeightSync(engine_of(actor, dtype)), dtype=getattr(torch, dtype))


def test_the_effect_is_judged_by_what_rounding_leaves_of_it():
    generator = torch.Generator().manual_seed(3)
    base, effect, noise, other = torch.randn(4, 64, generator=generator).tolist()
    limits = CANARY_LIMITS[torch.bfloat16]

    def share(times, effect_size, noise_size):
        def scores(effect_size, noise):
            parts = zip(base, effect, noise, strict=True)
            return [b + effect_size * e + noise_size * n for b, e, n in parts]

        trainer, engine = scores(effect_size, noise), scores(times * effect_size, other)
        return check_effect(limits, trainer, base, engine)

    assert share(1, 0.1, 0.03) == pytest.approx(1, abs=0.2)
    assert share(1, 0.03, 0.03) is not None
    assert share(0, 0.01, 0.0) is None
    for times, size in ((0, 0.1), (2, 0.2), (-1, 0.1), (float("nan"), 0.1)):
        with pytest.raises(WeightSyncError, match="of what the adapters do"):
            share(times, size, 0.03)


def settings(**options):
    return SimpleNamespace(
        **{
            "pretrain": None,
            "engine_type": "hf",
            "bf16": False,
            "train_batch_size": 2,
            "lora_sync": "adapter",
            **options,
        }
    )


def test_the_base_sleeps_on_the_host_and_is_compared_when_it_wakes(tmp_path):
    with get_fake_strategy(settings(enable_engine_sleep=True)) as strategy:
        actor = lora_actor()
        strategy.save_ckpt(actor, str(tmp_path), "first")
        actor.model.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1e-3
        engine = strategy.setup_inference_engine(None, "hf", actor=actor)
        generate = partial(
            strategy.gather_and_generate,
            SamplingParams(temperature=0.0, max_tokens=2),
            [GenerationRequest(PROMPT)],
        )
        generate()
        strategy.sleep_until_weight_sync()
        strategy.wakeup_inference_engine()
        generate()
        layer = engine.native.model.layers[0].mlp.down_proj
        for factor in (layer.lora_A, layer.lora_B):
            kept = factor.weight.data[0, 0].clone()
            factor.weight.data[0, 0] += 1e-3
            with pytest.raises(StaleEngineError, match=r"while it slept: .*down_proj.lora_"):
                generate()
            factor.weight.data[0, 0] = kept
            strategy.update_engine_weights(actor)
            strategy.maybe_sleep_inference_engine()
        layer.weight.data[0, 0] += 1e-3
        with pytest.raises(StaleEngineError, match=r"while it slept: .*layers.0.mlp.down_proj"):
            generate()
        with pytest.raises(WeightSyncError, match=r"layers.0.mlp.down_proj"):
            strategy.update_engine_weights(actor)
        # What is loaded may be another base than before.
        strategy.load_ckpt(actor, str(tmp_path), "first", load_module_only=True)
        strategy.update_engine_weights(actor)


def test_an_actor_without_adapters_is_refused(monkeypatch):
    with get_fake_strategy(settings()) as strategy:
        for actor, got in ((None, "no actor"), (tiny_model(), "Qwen3ForCausalLM")):
            with pytest.raises(ValueError, match=f"got {got}.*lora_sync merged"):
                strategy.setup_inference_engine(None, "hf", actor=actor)
        monkeypatch.setattr("lightrft.config.parts.machine.engine_facts", lambda _: EngineFacts())
        with pytest.raises(ValueError, match="the hf engine holds no adapters"):
            strategy.setup_inference_engine(None, "hf", actor=lora_actor())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"engine_type": "vllm", "engine_tp_size": 2}, "on one rank alone: got engine_tp_size 2"),
        ({"engine_type": "sglang"}, "the sglang engine holds no adapters"),
        ({"engine_type": "auto"}, "give engine_type hf or vllm, or lora_sync merged"),
        ({"lora_rank": 0}, "lora_sync adapter needs lora_rank"),
    ],
)
def test_what_cannot_take_adapters_is_refused_with_the_options(changes, message):
    given = {"engine_type": "hf", "lora_rank": RANK, "lora_sync": "adapter", **changes}
    with pytest.raises(ConfigError, match=message) as caught:
        TrainConfig(**given)
    assert len(str(caught.value).splitlines()) == 2


def test_the_output_projection_takes_no_adapter():
    with pytest.raises(ConfigError, match="target_modules"):
        lora_actor(target_modules=("lm_head",))
    with pytest.raises(ConfigError, match="target_modules"):
        lora_actor(target_modules=("embed_tokens",))


def test_the_error_of_a_start_is_shown_though_the_base_has_no_room_to_return(monkeypatch):
    actor, moves = lora_actor(), []

    def move(*args):
        moves.append(args)
        if len(moves) > 1:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(parameter_source, "use_storage", move)
    read = partial(module_parameter_source, actor)
    with (
        pytest.raises(ValueError, match="start"),
        parameter_source.lent_base(actor, read, lambda *_: {}),
    ):
        raise ValueError("start")
    assert len(moves) == 2
