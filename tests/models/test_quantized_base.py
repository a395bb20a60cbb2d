"""Adapters on a base of 4 bits: one quantiser, whose weights trainer, engine and files share."""

import pytest
import torch
from safetensors.torch import load_file
from tests.models.batches import draw_second_factors, merged_reference, relative_norm
from tests.models.test_lora import ALPHA, RANK, logprobs_of, loss_of, options_of, step
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import make, prepared
from transformers import AutoModelForCausalLM

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.nf4 import NF4Linear, quantized_layers
from lightrft.models.loading import load_causal_lm
from lightrft.models.lora import LoraActor
from lightrft.stages.preference.stored_reference import hash_of_start
from lightrft.strategy.checkpoints.shard_files import full_value
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.weight_sync.canary import compute_dtypes
from lightrft.strategy.weight_sync.parameter_source import engine_source
from lightrft.strategy.weight_sync.verification import WeightSyncError

functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
peft = pytest.importorskip("peft", reason="package peft is not installed")

PARTS = ("codes", "scales", "ranges")
OPTIONS = {"lora_rank": RANK, "lora_alpha": ALPHA, "quantize": "nf4", "fsdp": True}
IDS = torch.arange(24).view(2, 12) * 5 % 97


def actor_of(path, **changes):
    return LoraActor(load_causal_lm(path), TrainConfig(**OPTIONS | changes))


def reference_of(path, dtype):
    """Plain float64 model with the base that bitsandbytes gives back, and PEFT's adapters."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, value in model.named_parameters():
        if "_proj" in name:
            codes, state = functional.quantize_4bit(
                value.data, blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            value.data = functional.dequantize_4bit(codes, state).to(dtype).float()
    return model.double()


def with_adapters(model, actor):
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    made = peft.get_peft_model(model, config)
    factors = {n: full_value(p) for n, p in actor.named_parameters() if ".lora_" in n}
    for name, value in made.named_parameters():
        if ".lora_" in name:
            value.data = factors[
                name.removeprefix("base_model.model.").join(["model.", ""])
            ].double()
    return made


def gradients(actor):
    return {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


def test_logprobs_and_gradients_are_those_of_peft_on_the_dequantised_base(checkpoint):
    actor = actor_of(checkpoint)
    assert actor.coverage == (
        "adapters on 14 layers; 14 layers with 0.246 million weights in 4 bits (NF4), dequantised "
        "to float32 where they are used and in a merged export"
    )
    draw_second_factors(actor)
    exact = with_adapters(reference_of(checkpoint, torch.float32), actor)
    logprobs = logprobs_of(exact, IDS)
    own = actor(IDS, torch.ones_like(IDS).bool()).logprobs
    torch.testing.assert_close(own[:, 1:].double(), logprobs, rtol=0, atol=2e-5)
    (-logprobs.sum()).backward()
    (-own[:, 1:].sum()).backward()
    found = gradients(actor)
    expected = {
        "model." + n.removeprefix("base_model.model."): p.grad
        for n, p in exact.named_parameters()
        if p.grad is not None and ".lora_" in n
    }
    assert found.keys() == expected.keys()
    assert relative_norm(found, expected) < 1e-5


def started(strategy, path, *, meta_init=False, **changes):
    with strategy.init_model_context(meta_init):
        actor = actor_of(path, **changes)
    draw_second_factors(actor)
    return prepared(strategy, actor)


def trained(strategy, path, rank, **changes):
    ready = started(strategy, path, **changes)
    norms = [step(strategy, ready, rank) for _ in range(2)]
    return ready, norms


def test_engine_file_and_checkpoint_of_one_process(checkpoint, tmp_path):
    with make("fake", **options_of(checkpoint, 1, lora_sync="merged")) as strategy:
        ready, _ = trained(strategy, checkpoint, 0)
        actor = strategy.unwrap_model(ready)
        base = reference_of(checkpoint, torch.float32)
        expected = merged_reference(actor, base, ALPHA / RANK)
        strategy.setup_inference_engine(None, "hf", actor=ready)
        engine = dict(strategy.inference_engine.native.named_parameters())
        report = strategy.last_weight_sync
        assert report.num_verified_bytes == sum(p.nbytes for p in engine.values())
        strategy.save_model(ready, None, str(tmp_path / "model"))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        for name, value in saved.named_parameters():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
            assert torch.equal(value, engine[name])
        adapters = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
        assert all(".lora_" in name for name in adapters)
        strategy.save_ckpt(ready, str(tmp_path / "ckpt"), "first")
        (file,) = (tmp_path / "ckpt" / "first" / "model").glob("*.safetensors")
        assert all(".lora_" in name for name in load_file(file))
        start = hash_of_start(ready, strategy.backend)
        norm = step(strategy, ready)
        assert hash_of_start(ready, strategy.backend) == start
        scales = next(iter(quantized_layers(actor).values())).ranges
        scales[1] ^= 1
        assert hash_of_start(ready, strategy.backend) != start
        with pytest.raises(
            CheckpointError, match=r"with frozen weights .*: got .*; give the model"
        ):
            strategy.load_ckpt(ready, str(tmp_path / "ckpt"), "first")
        scales[1] ^= 1
        strategy.load_ckpt(ready, str(tmp_path / "ckpt"), "first")
        assert step(strategy, ready) == norm


def test_a_block_that_differs_and_an_adapter_scaled_twice_end_the_run(checkpoint):
    with make("fake", **options_of(checkpoint, 1, lora_sync="merged")) as strategy:
        ready, _ = trained(strategy, checkpoint, 0, target_modules=("q_proj",))
        actor = strategy.unwrap_model(ready)
        strategy.setup_inference_engine(None, "hf", actor=ready)
        strategy.update_engine_weights(ready)
        # Layers without adapters are frozen: the engine has them already.
        assert strategy.last_weight_sync.num_resident_bytes > 0
        engine = dict(strategy.inference_engine.native.named_parameters())
        block = engine["model.layers.0.mlp.up_proj.weight"].data.view(-1)[64:128]
        block.neg_()
        with pytest.raises(WeightSyncError, match=r"hash.*layers\.0\.mlp\.up_proj\.weight"):
            strategy.update_engine_weights(ready)
        block.neg_()
        strategy.update_engine_weights(ready)
        layer = quantized_layers(actor.model)["model.layers.0.mlp.up_proj"]
        before = layer.scales[3].clone()
        for plant in (lambda: setattr(actor, "scale", 2 * actor.scale), lambda: computes(layer)):
            plant()
            with pytest.raises(WeightSyncError, match="canary"):
                strategy.update_engine_weights(ready)
            actor.scale = ALPHA / RANK
        assert layer.scales[3] == before
        del layer.dense
        adapted = quantized_layers(actor.model)["model.layers.0.self_attn.q_proj.base_layer"]
        for values, name in (
            (adapted.codes.data, "q_proj.base_layer.codes"),
            (adapted.ranges, "q_proj.base_layer.ranges"),
            (layer.codes.data, "up_proj.weight"),
        ):
            values.view(-1)[1] ^= 1
            with pytest.raises(
                WeightSyncError, match=rf"1 frozen .*: model\.layers\.0\.\w+\.{name};"
            ):
                strategy.update_engine_weights(ready)
            values.view(-1)[1] ^= 1
        strategy.update_engine_weights(ready)


def computes(layer):
    """Let the trainer compute with another block than is sent."""
    dense = layer.dense

    def other(codes, scales):
        weight = dense(codes, scales)
        weight.view(-1)[64:128] *= -8
        return weight

    layer.dense = other


def parts(model):
    """Tensors of the layers of 4 bits by the engine's names."""
    layers = quantized_layers(model).items()
    return {
        f"{name}.{part}".replace(".base_layer", ""): getattr(layer, part).data
        for name, layer in layers
        for part in PARTS
    }


def engine_beside(strategy, ready):
    strategy.setup_inference_engine(None, "hf", actor=ready)
    return strategy.inference_engine, strategy.unwrap_model(ready).model


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_and_engine_of_one_process_hold_one_base(checkpoint, bf16):
    options = options_of(checkpoint, 1, bf16=bf16)
    with make("fsdp2" if bf16 else "fake", **options) as strategy:
        ready, _ = trained(strategy, checkpoint, 0, bf16=bf16)
        engine, model = engine_beside(strategy, ready)
        ours, held = parts(model), parts(engine.native)
        assert len(held) == 42
        for name, value in ours.items():
            local = getattr(value, "to_local", lambda value=value: value)()
            assert held[name].data_ptr() == local.data_ptr()
        engine_tensors = dict(engine.native.named_parameters())
        assert not any(name.endswith("_proj.weight") for name in engine_tensors)
        factors = sum(p.nbytes for n, p in engine_tensors.items() if ".lora_" in n)
        report = strategy.last_weight_sync
        assert report.num_bytes == factors
        whole = sum(p.nbytes for p in {**engine_tensors, **held}.values())
        assert report.num_verified_bytes == report.num_aliased_bytes + factors == whole
        actor = strategy.unwrap_model(ready)
        dtype = torch.bfloat16 if bf16 else torch.float32
        exact = with_adapters(reference_of(checkpoint, dtype), actor)
        expected = logprobs_of(exact, IDS)
        scores = torch.tensor([engine.score(row.tolist())[1:] for row in IDS]).double()
        assert (scores - expected).abs().max() < (0.05 if bf16 else 2e-5)
        source = engine_source(actor, strategy.backend.parameter_source(ready), has_adapters=True)
        # The canary's limits are those of the passes, not of an engine that rounds by itself.
        assert compute_dtypes(dtype, engine, source) == {dtype, torch.float32}
        engine.sleep(level=2)
        assert all(held[name].numel() for name in held)
        assert not any(p.numel() for n, p in engine_tensors.items() if ".lora_" in n)
        engine.wake_up()
        strategy.update_engine_weights(ready)
        assert strategy.last_weight_sync.num_bytes == factors


@pytest.mark.parametrize("part", PARTS)
def test_a_write_into_the_shared_base_ends_the_run(checkpoint, part):
    with make("fake", **options_of(checkpoint, 1)) as strategy:
        ready, _ = trained(strategy, checkpoint, 0)
        engine, _ = engine_beside(strategy, ready)
        name = f"model.layers.1.mlp.down_proj.{part}"
        values = parts(engine.native)[name].view(-1)  # also the trainer's
        values[3] ^= 1
        for _ in range(2):
            with pytest.raises(WeightSyncError, match=rf"hash.*1 frozen .*changed since .*{name}"):
                strategy.update_engine_weights(ready)
        values[3] ^= 1
        strategy.update_engine_weights(ready)
        # A copy of the storage is not taken for the storage itself.
        layer = quantized_layers(engine.native)["model.layers.1.mlp.down_proj"]
        getattr(layer, part).data = getattr(layer, part).data.clone()
        getattr(layer, part).data.view(-1)[3] ^= 1
        engine.alias_weights = lambda tensors: True
        with pytest.raises(WeightSyncError, match=rf"hash.*1 of .*differ.*{name}"):
            strategy.update_engine_weights(ready)


def test_an_engine_that_computes_with_another_block_ends_the_run(checkpoint):
    with make("fake", **options_of(checkpoint, 1)) as strategy:
        ready, _ = trained(strategy, checkpoint, 0)
        engine, _ = engine_beside(strategy, ready)
        layer = quantized_layers(engine.native)["model.layers.0.mlp.up_proj"]
        actor = strategy.unwrap_model(ready)
        for plant in (lambda: computes(layer), lambda: setattr(actor, "scale", 2 * actor.scale)):
            plant()
            with pytest.raises(WeightSyncError, match="canary"):
                strategy.update_engine_weights(ready)
            vars(layer).pop("dense", None)
        actor.scale = ALPHA / RANK
        strategy.update_engine_weights(ready)


def beside_engines(rank, world_size, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with make("fsdp2", **options_of(path, world_size)) as strategy:
        ready = started(strategy, path)
        engine, model = engine_beside(strategy, ready)
        first = strategy.last_weight_sync
        result = [first.engine_hash, first.num_bytes, engine.score(IDS[0].tolist())]
        held = parts(engine.native)
        layer = quantized_layers(model)["model.layers.0.mlp.up_proj.base_layer"]
        codes = layer.codes.to_local()
        for values, message in (
            (held["model.layers.0.mlp.up_proj.codes"], r"hash.*rank 1|hash.*up_proj\.codes"),
            (codes, r"frozen .* changed .*up_proj\.codes"),
            (layer.ranges, r"hold other weights than rank 0"),
        ):
            values.view(-1)[0] ^= rank
            with pytest.raises(WeightSyncError, match=message):
                strategy.update_engine_weights(ready)
            values.view(-1)[0] ^= rank
            strategy.update_engine_weights(ready)
        step(strategy, ready)
        strategy.update_engine_weights(ready)
        last = strategy.last_weight_sync
        return [
            *result,
            last.num_bytes,
            last.num_verified_bytes,
            sum(map(torch.numel, held.values())),
        ]


@pytest.mark.full
def test_packed_bytes_reach_the_engines_of_two_ranks(checkpoint):
    first, second = run_multiprocess(beside_engines, 2, timeout_seconds=300, args=(checkpoint,))
    assert first == second
    engine_hash, sent, scores, sent_later, verified, packed_bytes = first
    with make("fake", **options_of(checkpoint, 1)) as strategy:
        ready = started(strategy, checkpoint)
        engine, _ = engine_beside(strategy, ready)
        assert strategy.last_weight_sync.engine_hash == engine_hash
        assert engine.score(IDS[0].tolist()) == pytest.approx(scores, abs=1e-5)
        tensors = dict(engine.native.named_parameters())
        factors = sum(p.nbytes for n, p in tensors.items() if ".lora_" in n)
        floats = sum(p.nbytes for p in tensors.values() if p.is_floating_point())
    assert sent == verified == packed_bytes + floats
    assert sent_later == factors


def on_two_ranks(rank, world_size, path, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, changes in (("read", {"meta_init": True}), ("whole", {})):
        with make("fsdp2", **options_of(path, world_size, lora_sync="merged")) as strategy:
            ready, norms = trained(strategy, path, rank, **changes)
            assert all(p.to_local().dtype == torch.uint8 for p in packed(ready.model))
            local = sum(p.to_local().nbytes for p in packed(ready.model))
            assert local <= 0.6 * sum(p.nbytes for p in packed(ready.model))
            strategy.setup_inference_engine(None, "hf", actor=ready)
            results[name] = norms, strategy.last_weight_sync.engine_hash
            codes = packed(ready.model)[0].to_local()
            codes[0, 0] ^= rank
            with pytest.raises(WeightSyncError, match=r"frozen .* changed .*codes"):
                strategy.update_engine_weights(ready)
            codes[0, 0] ^= rank
            strategy.update_engine_weights(ready)
            strategy.save_model(ready, None, f"{folder}/{name}")
            strategy.save_ckpt(ready, f"{folder}/{name}_ckpt", "first")
            norm = step(strategy, ready, rank)
            strategy.load_ckpt(ready, f"{folder}/{name}_ckpt", "first")
            assert step(strategy, ready, rank) == norm
    return results


def packed(model):
    layers = (each for each in model.modules() if isinstance(each, NF4Linear))
    return [value for layer in layers for value in (layer.codes, layer.scales)]


@pytest.mark.full
def test_two_ranks_equal_one_process(checkpoint, tmp_path):
    first, second = run_multiprocess(
        on_two_ranks, 2, timeout_seconds=300, args=(checkpoint, str(tmp_path))
    )
    assert first == second
    assert first["read"] == first["whole"]
    with make("fake", **options_of(checkpoint, 2, micro_train_batch_size=1)) as strategy:
        ready = started(strategy, checkpoint)
        norms = []
        for _ in range(2):
            for rank in range(2):
                loss = loss_of(ready.model, rank)
                strategy.backward(loss, ready.model, ready.optimizer)
                result = strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler)
            norms.append(result.grad_norm)
        assert first["read"][0] == pytest.approx(norms, rel=1e-5)
        strategy.save_model(ready, None, str(tmp_path / "one"))
    one, two = (load_file(tmp_path / each / "model.safetensors") for each in ("one", "read"))
    assert relative_norm(two, one) < 1e-3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lora_rank": 0}, "quantize: 4 bits take no update, so it needs adapters: add lora_rank"),
        ({"fsdp": False}, "quantize: DeepSpeed moves weights as floats"),
        ({"enable_ema": True}, "quantize excludes enable_ema: codes of 4 bits have no average"),
        ({"audit_every": 1}, "quantize excludes audit_every: an audit computes with the weights"),
        (
            {"lora_sync": "adapter", "engine_type": "vllm"},
            "lora_sync adapter: the vllm engine takes no layers of 4 bits (quantize) below "
            "adapters: give engine_type hf, or lora_sync merged",
        ),
        ({"compile_backend": "eager"}, "quantize excludes compile_backend"),
        ({"fsdp_cpu_offload": True}, "quantize excludes fsdp_cpu_offload"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        TrainConfig(**OPTIONS | changes).validate()
    assert [line for line in str(error.value).splitlines() if message in line], str(error.value)
