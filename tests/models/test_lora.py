"""Adapters: bound, trained alone, merged exactly in the engine and in files, never in the base."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.models.all_types import types
from tests.models.batches import draw_second_factors, merged_reference
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import are_equal, make, prepared, weights
from transformers import AutoModelForCausalLM, GPT2Config

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.models.loading import load_causal_lm
from lightrft.models.lora import LoraActor, add_product
from lightrft.stages.start_checks import check_parts
from lightrft.strategy.fsdp2 import sharding

peft = pytest.importorskip("peft", reason="package peft is not installed")

RANK, ALPHA = 3, 12.0
ADAPTER_FILE = "adapter_model.safetensors"


def lora_actor(path, **options):
    config = TrainConfig(**{"lora_rank": RANK, "lora_alpha": ALPHA, **options})
    return LoraActor(load_causal_lm(path), config)


def plain(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def tokens():
    ids = torch.tensor([[5, 17, 60, 99, 3, 44, 71, 8]])
    return ids, torch.ones_like(ids).bool()


def logprobs_of(model, ids):
    return model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def test_only_adapters_are_trained_and_dropout_only_acts_in_training(checkpoint):
    actor = lora_actor(checkpoint)
    trained = [n for n, p in actor.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_A." in n or ".lora_B." in n for n in trained)
    # All 7 linear layers of both blocks, and no output projection.
    assert len(trained) == 2 * 7 * 2
    ids, mask = tokens()
    noisy = lora_actor(checkpoint, lora_dropout=0.5)
    draw_second_factors(noisy)
    assert not torch.equal(noisy(ids, mask).logprobs, noisy(ids, mask).logprobs)
    noisy.eval()
    assert torch.equal(noisy(ids, mask).logprobs, noisy(ids, mask).logprobs)


def test_a_target_that_binds_to_nothing_is_an_error(checkpoint):
    with pytest.raises(ConfigError, match=r"called q_projection; the model has .*q_proj"):
        lora_actor(checkpoint, target_modules=("q_proj", "q_projection"))
    with pytest.raises(ConfigError, match="lora_rank >= 1"):
        lora_actor(checkpoint, lora_rank=0)


@pytest.fixture
def of_peft(checkpoint, tmp_path_factory):
    """A model of PEFT with adapters that have an effect, and the folder it wrote."""
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    base = plain(checkpoint)
    model = peft.get_peft_model(base, peft.LoraConfig(**settings, task_type="CAUSAL_LM"))
    draw_second_factors(model)
    folder = tmp_path_factory.mktemp("adapters") / "made"
    model.save_pretrained(folder)
    return model.eval(), folder


def test_training_starts_from_adapters_of_peft_and_gives_them_back(checkpoint, of_peft, tmp_path):
    model, folder = of_peft
    layers = ("down_proj", "q_proj")
    actor = lora_actor(checkpoint, target_modules=layers, lora_path=str(folder))
    ids, mask = tokens()
    scores = actor(ids, mask).logprobs[:, 1:]
    torch.testing.assert_close(scores, logprobs_of(model, ids), rtol=0, atol=2e-5)
    assert all(p.requires_grad == (".lora_" in n) for n, p in actor.named_parameters())
    actor.save_adapters(dict(actor.state_dict()), tmp_path)
    assert_equal_files(tmp_path / ADAPTER_FILE, folder / ADAPTER_FILE)


@pytest.mark.parametrize(
    "model_type, targets",
    [
        ("deepseek_v3", "all-linear"),
        ("glm4_moe", "all-linear"),
        ("glm4_moe", "up_proj"),
        ("qwen3_moe", "all-linear"),
        # Classes with another product: no adapter for a router or for groups, but one for Falcon's.
        ("deepseek_v4", "all-linear"),
        ("llama4_text", "all-linear"),
        ("phimoe", "all-linear"),
        ("falcon", "all-linear"),
    ],
)
def test_peft_reads_adapters_of_dense_layers_beside_experts(model_type, targets, tmp_path):
    base, folder = types.tiny_model(model_type).eval(), tmp_path / "model"
    options = {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": (targets,)}
    options |= {"lora_dropout": 0.1, "pretrain": str(folder)}
    base.save_pretrained(folder)
    actor = LoraActor(copy.deepcopy(base), TrainConfig(**options)).eval()
    draw_second_factors(actor)
    actor.save_adapters(dict(actor.state_dict()), tmp_path)
    ids, mask = tokens()
    expected = actor(ids, mask).logprobs.detach()
    again = LoraActor(copy.deepcopy(base), TrainConfig(**options, lora_path=str(tmp_path))).eval()
    assert torch.equal(again(ids, mask).logprobs, expected)
    found = logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path).eval(), ids)
    torch.testing.assert_close(found, expected[:, 1:], rtol=0, atol=2e-5)


def test_adapters_are_compared_before_weights_are_read(checkpoint, tmp_path):
    actor = lora_actor(checkpoint)
    actor.save_adapters(dict(actor.state_dict()), tmp_path)
    given = {"pretrain": str(checkpoint), "lora_rank": RANK, "lora_alpha": ALPHA}
    check_parts(TrainConfig(**given, lora_path=str(tmp_path)), AutoModelForCausalLM)
    with pytest.raises(ConfigError, match="for other layers than target_modules q_proj"):
        others = {"lora_path": str(tmp_path), "target_modules": ("q_proj",)}
        check_parts(TrainConfig(**given, **others), AutoModelForCausalLM)


def assert_equal_files(one, other):
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "options, settings, message",
    [
        ({"lora_rank": 4}, {}, r"have r 3, got lora_rank 4: give --lora_rank 3"),
        ({"lora_alpha": 3.0}, {}, r"lora_alpha 12.*got lora_alpha 3: give --lora_alpha 12"),
        ({"target_modules": ("all-linear",)}, {}, r"lack .*: give --target_modules down_proj q_pr"),
        ({"target_modules": ("q_proj",)}, {}, r"adapters alone have .*down_proj.lora_A"),
        ({}, {"use_dora": True}, r"use_dora True, which is not trained here: merge"),
        ({}, {"rank_pattern": {"q_proj": 2}}, r"rank_pattern .* not trained here"),
        ({}, {"peft_type": "IA3"}, r"peft_type 'IA3'"),
        ({}, {"init_lora_weights": "pissa"}, r"init_lora_weights 'pissa'"),
        ({}, {"base_model_name_or_path": "Qwen/Qwen3-8B"}, r"made on Qwen/Qwen3-8B, got pretrain"),
        ({"lora_path": "/nowhere"}, {}, r"lora_path: /nowhere/adapter_config.json"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    checkpoint, of_peft, tmp_path, options, settings, message
):
    folder = tmp_path / "adapters"
    shutil.copytree(of_peft[1], folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    given = {"target_modules": ("q_proj", "down_proj"), "lora_path": str(folder), **options}
    with pytest.raises(ConfigError, match=message) as caught:
        lora_actor(checkpoint, pretrain=str(checkpoint), **given)
    assert "\n" not in str(caught.value)


def test_adapters_without_a_file_of_weights_are_refused(checkpoint, of_peft, tmp_path):
    shutil.copytree(of_peft[1], tmp_path / "a")
    (tmp_path / "a" / ADAPTER_FILE).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"cannot be read .*save the adapters as safetensors"):
        lora_actor(checkpoint, target_modules=("q_proj",), lora_path=str(tmp_path / "a"))


def test_seed_fixes_the_factors_and_leaves_the_generator_alone(checkpoint):
    torch.manual_seed(9)
    first = lora_actor(checkpoint, seed=1)
    drawn = torch.rand(())
    torch.manual_seed(9)
    second, third = lora_actor(checkpoint, seed=1), lora_actor(checkpoint, seed=2)
    assert drawn == torch.rand(())
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    differs = [
        not torch.equal(p, q) for p, q in zip(first.parameters(), third.parameters(), strict=True)
    ]
    assert any(differs)


@pytest.mark.parametrize("start, stop", [(0, 35), (3, 4), (6, 15), (34, 35), (7, 7), (0, 34)])
def test_product_has_the_same_bits_in_every_range(start, stop):
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(s, generator=generator) for s in ((3, 7), (5, 3)))
    base = torch.randn(35, generator=generator)
    whole, part = base.clone(), base[start:stop].clone()
    add_product(whole, 0, first, second, scale=0.3)
    add_product(part, start, first, second, scale=0.3)
    assert torch.equal(part, whole[start:stop])
    expected = base.double() + 0.3 * (second.double() @ first.double()).view(-1)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-7, atol=1e-7)


def options_of(path, world_size, **changes):
    settings = {"pretrain": path, "actor_learning_rate": 0.02, "enable_engine_sleep": False}
    return settings | {"train_batch_size": world_size, **changes}


def step(strategy, ready, rank=0):
    """Carry out an optimizer step; return the norm of its gradient."""
    strategy.backward(loss_of(ready.model, rank), ready.model, ready.optimizer)
    return strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler).grad_norm


def loss_of(actor, rank):
    ids = torch.arange(24).view(2, 12) * 5 % 97 + rank
    return -actor(ids, torch.ones_like(ids).bool()).logprobs.mean()


def train_twice(strategy, path, rank):
    """Two optimizer steps; returns the ready actor."""
    actor = lora_actor(path)
    draw_second_factors(actor)
    ready = prepared(strategy, actor)
    for _ in range(2):
        step(strategy, ready, rank)
    return ready


def check_engine_and_file(strategy, ready, path, folder, base):
    """The engine's greedy tokens, hash and file are those of the merged model."""
    strategy.setup_inference_engine(None, "hf", actor=ready)
    strategy.update_engine_weights(ready)
    report = strategy.last_weight_sync
    assert not report.is_aliased
    prompt = (5, 17, 60)
    (completion,) = strategy.gather_and_generate(
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), [GenerationRequest(prompt)]
    )
    strategy.save_model(ready, None, folder)
    saved = AutoModelForCausalLM.from_pretrained(folder).eval()
    full = dict(saved.named_parameters())
    assert not any("lora" in name or "base_layer" in name for name in full)
    moved = [n for n, p in full.items() if not torch.equal(p, base[n])]
    assert moved
    assert all("proj" in name for name in moved)
    engine = dict(strategy.inference_engine.native.named_parameters())
    assert all(torch.equal(p, engine[n]) for n, p in full.items())
    ids = [*prompt]
    for _ in range(6):
        ids.append(int(saved(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(completion.output_token_ids) == ids[3:]
    return report, {name: value.detach().clone() for name, value in full.items()}


def check_resume(strategy, ready, path, folder, rank):
    """A checkpoint brings adapters and moments back: the next step is the same."""
    strategy.save_ckpt(ready, folder, "first")
    step(strategy, ready, rank)
    after = weights(strategy, ready)
    strategy.load_ckpt(ready, folder, "first")
    assert not are_equal(after, weights(strategy, ready))
    step(strategy, ready, rank)
    assert are_equal(after, weights(strategy, ready))


def check_adapters(ready, path, folder):
    """PEFT gives the base model the policy's numbers with the adapters that were written."""
    base = plain(path)
    found = peft.PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
    ids, mask = tokens()
    before = logprobs_of(plain(path), ids)
    again = ready(ids, mask).logprobs[:, 1:]
    assert (again - before).abs().max() > 1e-3
    torch.testing.assert_close(logprobs_of(found, ids), again, rtol=0, atol=2e-5)


def base_of(path):
    return dict(plain(path).named_parameters())


def test_one_process_syncs_saves_and_resumes(checkpoint, tmp_path):
    with make("fake", **options_of(checkpoint, 1)) as strategy:
        ready = train_twice(strategy, checkpoint, 0)
        expected = merged_reference(strategy.unwrap_model(ready), plain(checkpoint), ALPHA / RANK)
        _, full = check_engine_and_file(
            strategy, ready, checkpoint, str(tmp_path / "model"), base_of(checkpoint)
        )
        for name, value in full.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
        check_adapters(ready, checkpoint, tmp_path / "model")
        frozen = {n: p for n, p in ready.model.named_parameters() if "base_layer" in n}
        original = base_of(checkpoint)
        for name, value in frozen.items():
            stored = name.removeprefix("model.").replace(".base_layer", "")
            assert torch.equal(value, original[stored])
        check_resume(strategy, ready, checkpoint, str(tmp_path / "ckpt"), 0)


def frozen_in_bfloat16(rank, world_size, path):
    """Trains with frozen weights stored wide, then as they are; the engine takes these."""
    torch.distributed.init_process_group("gloo")
    options = options_of(path, 1, bf16=True, lora_sync="adapter")
    narrow, trained = sharding.cast_parameters, []
    wide = SimpleNamespace(param_dtype=torch.float32, compute_dtype=torch.float32)
    for cast in (lambda module, _: narrow(module, wide), narrow):
        sharding.cast_parameters = cast
        with make("fsdp2", **options) as strategy:
            ready = train_twice(strategy, path, rank)
            trained.append([p.full_tensor() for p in ready.model.parameters() if p.requires_grad])
    dtypes = {value.requires_grad: value.dtype for value in ready.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    return all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@pytest.mark.full
def test_frozen_weights_are_stored_in_the_dtype_of_the_passes(checkpoint):
    assert run_multiprocess(frozen_in_bfloat16, 1, timeout_seconds=120, args=(checkpoint,)) == [
        True
    ]


BACKENDS = ("fsdp2", "zero2", "zero3")


def on_all_backends(rank, world_size, path, folder, names):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = {}
    for name in names:
        with make(name, **options_of(path, world_size)) as strategy:
            ready = train_twice(strategy, path, rank)
            report, full = check_engine_and_file(
                strategy, ready, path, f"{folder}/{name}", base_of(path)
            )
            results[name] = (report.num_payload_collectives, full)
            check_resume(strategy, ready, path, f"{folder}/{name}_ckpt", rank)
    return {n: (c, {k: v.numpy() for k, v in f.items()}) for n, (c, f) in results.items()}


@pytest.mark.full
@pytest.mark.deepspeed
def test_two_processes_agree_over_backends(checkpoints, tmp_path):
    path = checkpoints["tiny-qwen3"]
    first, second = run_multiprocess(
        on_all_backends, 2, timeout_seconds=400, args=(path, str(tmp_path), BACKENDS)
    )
    reference = first["fsdp2"][1]
    for name, (_, full) in first.items():
        for key, value in full.items():
            found = torch.from_numpy(value)
            assert torch.equal(found, torch.from_numpy(second[name][1][key]))
            expected = torch.from_numpy(reference[key])
            # AdamW's first steps are signs: where a gradient is rounding, it may differ.
            assert (found - expected).norm() <= 1e-3 * expected.norm(), (name, key)
    adapters = [load_file(tmp_path / name / "adapter" / ADAPTER_FILE) for name in BACKENDS]
    assert all(each.keys() == adapters[0].keys() for each in adapters)
    for key, expected in adapters[0].items():
        for found in adapters:
            assert (found[key] - expected).norm() <= 1e-3 * expected.norm(), key


def test_weights_without_adapters_are_named_with_their_share():
    dense, mixture = (
        LoraActor(tiny_model(family, **options), TrainConfig(lora_rank=2)).coverage
        for family, options in (
            ("qwen3", {}),
            ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 48}),
        )
    )
    assert dense == "adapters on 14 layers"
    assert mixture == (
        "adapters on 8 layers; 0.0742 of 0.0993 million weights, in experts and gate, get none"
    )
    alone = TrainConfig(lora_rank=2, target_modules=("q_proj", "v_proj"))
    line = LoraActor(tiny_model(), alone).coverage
    assert line.startswith("adapters on 4 layers; 0.0492 of 0.0619 million weights")
    assert "in gate_proj and up_proj and down_proj, get none" in line


def test_a_model_of_other_layers_is_refused_before_its_weights_are_read(tmp_path):
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2)
    config.save_pretrained(tmp_path)
    options = TrainConfig(pretrain=str(tmp_path), lora_rank=2)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no linear layer .* 8 of Conv1D"):
        check_parts(options, AutoModelForCausalLM)
