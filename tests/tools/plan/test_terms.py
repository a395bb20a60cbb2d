"""Terms of a plan one by one against tensors: each comparison fails if its term is off by half."""

from dataclasses import replace

import numpy as np
import peft  # noqa: F401  # what it makes on import would land on the device
import pytest
import torch
import transformers
from tests.models.tiny import tiny_model
from tests.records import exchange_cases
from tests.tools.plan import live_bytes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lightrft.config import TrainConfig
from lightrft.engines.hf.forward import ModelTraits
from lightrft.engines.types import KEPT_IDS, ROUTES
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer
from lightrft.models import Actor, LoraActor
from lightrft.models.lora import is_factor
from lightrft.models.sequence_model import freeze
from lightrft.models.support import KeptSets, SamplingSupport, kept_logprobs
from lightrft.records.batch import collate
from lightrft.records.table import tabulate
from lightrft.tools.plan.memory import (
    MemoryTerm,
    head_bytes,
    plan_memory,
    recorded_bytes,
    tower_bytes,
)
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import ModelSize

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOWERS = {
    "qwen2_vl": {"depth": 4, "embed_dim": 96, "hidden_size": 64, "num_heads": 4},
    "qwen2_5_vl": {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 200,
        "out_hidden_size": 64,
        "num_heads": 4,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 200,
        "out_hidden_size": 64,
        "num_heads": 4,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
    },
}


def vision_model(kind, **text):
    config = AutoConfig.for_model(
        kind, text_config={**TEXT, **text, "model_type": f"{kind}_text"}, vision_config=TOWERS[kind]
    )
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")


def setup_of(size, *, engine="hf", **options):
    config = TrainConfig(prompt_max_len=64, generate_max_len=64, bf16=False, **options)
    return Setup(config, size, 1, 1, False, 1e12, engine)


def close(predicted, measured, tolerance):
    """Return whether they agree; and a term that is off by half would not."""
    off = [abs(factor * predicted / measured - 1) <= tolerance for factor in (1.0, 0.5, 1.5)]
    assert off == [True, False, False], predicted / measured


@pytest.mark.parametrize("kind", TOWERS)
def test_b6_a_tower_counts_what_transformers_builds(kind):
    with torch.device("meta"):
        model = vision_model(kind)
    size = ModelSize.of_config(model.config.to_dict())
    tower = sum(p.numel() for n, p in model.named_parameters() if n.startswith("model.visual"))
    close(size.tower_parameters, tower, 0.03)
    close(size.parameters, sum(p.numel() for p in model.parameters()), 0.03)


@pytest.mark.parametrize("kind", ["llava", "internvl", "llava_onevision"])
def test_b6_towers_of_other_families_are_counted_within_a_twentieth(kind):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind))
    values = model.config.to_dict()
    names = ("model.vision_tower", "model.multi_modal_projector", "model.image_newline")
    tower = sum(p.numel() for n, p in model.named_parameters() if n.startswith(names))
    text = {**values["text_config"], "num_attention_heads": 8}
    close(ModelSize.of_config({**values, "text_config": text}).tower_parameters, tower, 0.05)


def test_b6_the_tower_of_qwen2_5_vl_7b_is_two_thirds_of_a_billion():
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_chans": 3,
    }
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}
    values = {"model_type": "qwen2_5_vl", **text, **heads, "vision_config": vision}
    size = ModelSize.of_config(values)
    assert size.tower_parameters == pytest.approx(0.676e9, rel=0.01)
    assert size.parameters == pytest.approx(8.29e9, rel=0.01)


@pytest.mark.parametrize("kind", TOWERS)
def test_b6_a_trained_tower_keeps_what_the_plan_says(kind):
    model = vision_model(kind)
    size = ModelSize.of_config(model.config.to_dict())
    setup = setup_of(size)
    patches = setup.num_patches(1)
    grid = torch.tensor([[1, 16, patches // 16]])
    pixels = torch.randn(patches, size.vision.patch_numbers)
    model.model.visual(pixels, grid_thw=grid)  # what is built once
    live = live_bytes.LiveBytes("cpu")
    with live:
        before = live.total
        kept = model.model.visual(pixels, grid_thw=grid)
        measured = live.total - before
    del kept
    close(tower_bytes(setup, setup.actor, 1), measured, 0.25)
    frozen = setup_of(size, freeze_prefix=("visual",))
    assert frozen.actor.trained == frozen.actor.total - size.tower_parameters
    assert tower_bytes(frozen, frozen.actor, 1) < 0.5 * measured


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "qwen2_5_vl"])
@pytest.mark.parametrize("frozen", [(), ("visual",)])
def test_adapters_count_what_peft_adds(kind, frozen):
    frozen = frozen if kind == "qwen2_5_vl" else ()
    if kind == "qwen2_5_vl":
        model = vision_model(kind)
    else:
        more = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
        more = more if kind == "qwen3_moe" else {}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TEXT, **more))
    size = ModelSize.of_config(model.config.to_dict())
    config = TrainConfig(lora_rank=4, freeze_prefix=frozen)
    actor = LoraActor(model, config)
    freeze(actor, frozen)
    added = sum(p.numel() for n, p in actor.named_parameters() if is_factor(n))
    setup = setup_of(size, lora_rank=4, freeze_prefix=frozen)
    close(setup.actor.adapters, added, 0.06)
    alone = {"lora_sync": "adapter", "engine_type": "hf"}
    apart = setup_of(size, lora_rank=4, freeze_prefix=frozen, **alone)
    assert (setup.num_sent, apart.num_sent) == (size.parameters, setup.actor.adapters)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_keys_and_values_of_a_token_are_those_of_a_cache(tp):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TEXT))
    cache = transformers.DynamicCache(config=model.config)
    inputs = {ModelTraits(model).cache_argument: cache}
    model(torch.zeros(1, 10, dtype=torch.long), **inputs)
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 10
    size = ModelSize.of_config(model.config.to_dict())
    setup = setup_of(size, engine="vllm", engine_tp_size=tp)
    # Two heads of keys: a third and a fourth rank hold copies.
    assert setup.cache_bytes / tp == whole / min(tp, 2)


def test_a_forward_pass_holds_the_logits_that_the_plan_says():
    size = replace(ModelSize.of_config({**TEXT, "model_type": "qwen2"}), vocab=4000)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2", **{**TEXT, "vocab_size": 4000})
    )
    actor = Actor(model, fused_linear_logprob=False)
    ids, mask = torch.zeros(2, 128, dtype=torch.long), torch.ones(2, 128)
    setup = setup_of(size, fused_linear_logprob=False)
    with torch.no_grad():
        actor(ids, mask)
        live = live_bytes.LiveBytes("cpu")
        with live:
            live.begin()
            before = live.total
            actor(ids, mask)
    close(head_bytes(setup, setup.actor, 256, is_training=False), live.peak - before, 0.2)


@pytest.mark.parametrize("width", [64, 512])
def test_logprobs_over_recorded_ids_hold_what_the_plan_says(width):
    text = {**TEXT, "hidden_size": width, "vocab_size": 4000, "model_type": "qwen2"}
    size = replace(ModelSize.of_config(text), vocab=4000)
    setup = setup_of(size, top_k=20)
    weight = torch.randn(4000, width, requires_grad=True)
    hidden, targets = torch.randn(2000, width, requires_grad=True), torch.zeros(2000).long()
    sizes = torch.full((2000,), 20)
    ids = torch.arange(20).repeat(2000).int()
    kept = KeptSets(ids, sizes.cumsum(0) - sizes, sizes, is_complete=True)
    layer = OutputLayer(weight, None, LogitsTransform(1.0, None))
    live = live_bytes.LiveBytes("cpu")
    with live:
        live.begin()
        before = live.total
        kept_logprobs(hidden, layer, targets, kept).sum().backward()
        expected = head_bytes(setup, setup.actor, 2000, is_training=True)
    # Gradients that stay are other terms.
    left = weight.grad.nbytes + hidden.grad.nbytes
    close(expected, live.peak - before, 0.2)
    assert expected > left


def test_records_of_the_sampling_hold_what_the_plan_says():
    rng, names = np.random.default_rng(0), (KEPT_IDS, ROUTES)
    shape = {"prompt": 64, "response": 64, "turns": 1, "recorded": names}
    rows = tabulate([exchange_cases.long_sample(rng, i, **shape)[0] for i in range(8)])
    batch = collate(
        rows, temperature=1.0, device=torch.device("cpu"), support=SamplingSupport(top_k=20)
    )
    moe = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
    size = ModelSize.of_config({**TEXT, **moe, "num_hidden_layers": 48})
    counts = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "train_batch_size": 8}
    setup = setup_of(size, top_k=20, micro_train_batch_size=4, **counts)
    setup = replace(setup, mean_length_share=1.0)
    places = sum(batch.facts[name].nbytes for name in ("kept_starts", "kept_sizes"))
    of_batch = places + batch.support.kept.ids.nbytes + batch.facts[ROUTES].nbytes
    # Experts of four rows as int64, twice.
    of_pass = 16 * batch.facts[ROUTES][:4].numel()
    close(recorded_bytes(setup), of_batch + of_pass, 0.02)
    phases = [p.name for p in plan_memory(setup).phases for t in p.terms if "experts" in t.name]
    assert phases == ["score", "train"]
    # A server gives experts only if it is asked.
    assert recorded_bytes(replace(setup, engine="vllm")) < 0.2 * of_batch


def test_every_term_of_a_plan_is_compared_somewhere_or_said_to_be_assumed():
    """A new name of a term fails here: compare it first, then name the comparison."""
    compared = {
        # Live tensors of two ranks, and traces of FSDP2 (test_live_bytes, test_fake_micro_batch).
        "weights", "weights, sharded", "Adam's states", "float32 weights", "gradients",
        "gradients, sharded", "activations", "output layer", "gradient of the output layer",
        "backward pass of a layer", "weights of an end", "gathered layers",
        "a layer's gradients", "gradients of an end", "end, as it is gathered",
        "bucket of gradients", "buckets of gradients", "small weights, whole", "small gradients",
        "copies of the bucket", "gradient of one tensor", "gathered weights",
        "gradients in bfloat16", "gradients of the step", "Adam's states, back from the host",
        # Stages on given rows (test_given_rows), and the exact number of parameters.
        "reference", "moving average", "engine: weights", "one whole tensor",
        # In this file.
        "tower: activations of a layer", "activations of a layer, or logits",
        "the exported model, on the first rank", "kept ids and experts of the samples",
        "engine: keys and values", "whole float32 weights, on the way",
        # Options and DeepSpeed's source.
        "buckets of weights", "a whole model, before it is divided",
        # `constants.CONSTANTS` says that they are assumed.
        "CUDA context and NCCL", "engine: graphs", "engine: activations",
    }  # fmt: skip
    found: set[str] = set()
    size = ModelSize.of_config({**TEXT, "model_type": "qwen2"})
    for options in (
        {"fsdp": True, "init_kl_coef": 0.01, "enable_ema": True, "adam_offload": True},
        {"fsdp": True, "lora_rank": 4},
        *({"zero_stage": stage, "bf16": bf16} for stage in (1, 2, 3) for bf16 in (True, False)),
    ):
        config = TrainConfig(**options)
        setup = Setup(config, size, 2, 2, True, 80e9, "vllm")
        terms: list[MemoryTerm] = [t for p in plan_memory(setup).phases for t in p.terms]
        found |= {t.name.partition(" of ")[0] if "keys" in t.name else t.name for t in terms}
    assert found <= compared


@pytest.mark.parametrize("rank", [0, 4])
def test_an_export_collects_the_model_that_the_plan_says(tmp_path, monkeypatch, rank):
    from lightrft.strategy import get_fake_strategy
    from lightrft.strategy.checkpoints import checkpoints

    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TEXT))
    config = TrainConfig(lora_rank=rank, bf16=False)
    actor = LoraActor(base, config) if rank else Actor(base)
    live, seen = live_bytes.LiveBytes("cpu"), []

    def measured(module, state, *_, dtype):
        from lightrft.strategy.weight_sync.parameter_source import exported_state

        merged = exported_state(module, state, dtype)
        seen.append(live.total)
        del merged

    monkeypatch.setattr(checkpoints, "save_gathered_model", measured)
    strategy = get_fake_strategy(config)
    with live:
        before = live.total
        strategy.save_model(actor, None, str(tmp_path))
    setup = setup_of(ModelSize.of_config(base.config.to_dict()), lora_rank=rank)
    (term,) = [t for t in plan_memory(setup).phases[-1].terms if "exported" in t.name]
    close(term.num_bytes, seen[0] - before, 0.1)


def test_a_budget_holds_more_responses_if_their_prompts_are_computed_once():
    size = ModelSize.of_config({**TEXT, "model_type": "llama"})
    options = {"packing_samples": True, "micro_batch_tokens": 1024}
    setups = (setup_of(size, shared_prefix=how, **options) for how in ("off", "auto"))
    alone, shared = (setup.scored_tokens(1) / 64 for setup in setups)
    # After the first, a sample counts its response and an eighth of its prompt, 72 tokens: 1024
    # hold 13 samples.
    assert alone == 8
    assert 13 <= shared < 15


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("response", [64, 256])
def test_an_eighth_of_a_repeated_prompt_is_what_rows_keep_of_it(response, kv_heads, recomputes):
    """Keys and values that each row reads; the more heads they have, the more they are."""
    prompt, group = 512, 8
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    more = {"intermediate_size": 352, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    actor = Actor(tiny_model("llama", **heads, **more), fused_linear_logprob=True).train()
    actor.pack_samples()
    if recomputes:
        actor.gradient_checkpointing_enable()
    ids = torch.randint(5, 131, (group, prompt + response), generator=torch.manual_seed(0))
    ids[:, :prompt] = ids[0, :prompt]
    scored = (torch.arange(prompt + response) >= prompt).expand_as(ids)
    peaks = []
    for least in (None, 16):
        actor.share_prefixes(least)
        live = live_bytes.LiveBytes()
        with live:
            for _ in range(2):  # in the first one gradients are new
                actor.zero_grad(set_to_none=False)
                live.begin()
                before = live.total
                output = actor(
                    ids,
                    torch.ones_like(scored),
                    scored_mask=scored,
                    token_loss=lambda logprobs, *_: logprobs.sum(),
                )
                output.loss.backward()
                del output
        peaks.append(live.peak - before)
    separate, shared = peaks
    config = TrainConfig(shared_prefix="auto")
    counted = ids.numel() - (group - 1) * config.uncounted_tokens(prompt)
    planned = separate * counted / ids.numel()
    # Fewer heads of keys than of queries keep less.
    assert 0.7 * planned < shared < 1.05 * planned
