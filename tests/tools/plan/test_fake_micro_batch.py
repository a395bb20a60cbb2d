"""A whole micro batch on device cuda without a GPU: forward, head, loss, backward, optimizer."""

from dataclasses import replace

import pytest
from tests.machine import seconds
from tests.tools.plan import fake_cuda

from lightrft.config import TrainConfig
from lightrft.tools.plan.memory import moments, resting, trunk_bytes
from lightrft.tools.plan.setup import SHAPES, ModelSize, Setup

pytestmark = pytest.mark.shard("planning_fake")


WORLD = 8


def case(name, layers, **options):
    size = replace(SHAPES[name], num_layers=layers)
    config = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "intermediate_size": size.intermediate,
        "tie_word_embeddings": size.is_tied,
    }
    kind = "Qwen3Config" if size.has_qk_norm else "Qwen2Config"
    if size.has_qk_norm:
        config["head_dim"] = size.head_dim
    return {"kind": kind, "config": config, **options}


def setup_of(name, layers, *, tokens):
    config = TrainConfig(
        fsdp=True,
        init_kl_coef=0,
        prompt_max_len=1,
        generate_max_len=tokens - 1,
        micro_train_batch_size=1,
    )
    size = replace(SHAPES[name], num_layers=layers)
    return Setup(config, size, WORLD, WORLD, True, 80e9, "hf")


def predicted(setup, forgets=()):
    """What a trace sees of it: resting states, and the peak without the opaque work space."""
    config = setup.config
    kept = [term for term in resting(setup, setup.actor) if term.name not in forgets]
    states = sum(term.num_bytes for term in kept)
    scored = setup.scored_tokens(config.micro_train_batch_size)
    visible = setup.compute_bytes * scored * setup.actor.size.hidden
    seen = [
        sum(visible if term.name == "output layer" else term.num_bytes for term in terms)
        for terms in moments(setup, setup.actor)
    ]
    return states, max(seen)


@pytest.mark.full
def test_no_tensor_of_the_host_takes_part_in_a_micro_batch():
    padded = case("qwen2.5-7b", 2, tokens=256, rows=2, padding=56, prompt=32)
    for seen in fake_cuda.trace(
        padded,
        {**padded, "packed": True, "lora": True, "checkpointing": True},
        timeout=seconds(1500),
    ):
        assert seen["foreign"] == []
        assert seen["scored"] == 256 + 200 - 2 * 32
        assert seen["peak"] > seen["kept"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_rows_of_32k_tokens_need_no_mask_of_a_gigabyte():
    layouts = ((32768, True), (32768, False), (16384, False))
    masked, free, half = fake_cuda.trace(
        *(case("qwen2.5-0.5b", 2, tokens=tokens, masked=masked) for tokens, masked in layouts),
        timeout=seconds(1500),
    )
    # The numbers of docs/scaling.md.
    assert [masked["peak"], free["peak"]] == pytest.approx([9.81e9, 4.75e9], rel=0.01)
    assert [masked["kept"], free["kept"]] == pytest.approx([8.50e9, 4.01e9], rel=0.01)
    # bool [tokens, tokens]; and grouped keys and values are repeated beside a mask.
    assert masked["peak"] - free["peak"] > 1.0e9
    # What is left is linear in the tokens.
    assert free["kept"] == pytest.approx(2 * half["kept"], rel=0.01)


def check(prediction, found):
    states, peak = prediction
    assert states == pytest.approx(found["resting"], rel=0.01), states / found["resting"]
    total = found["resting"] + found["peak"]
    assert states + peak == pytest.approx(total, rel=0.10), (states + peak) / total


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_plan_of_a_7b_shape_over_8_ranks_is_within_a_tenth_of_the_trace():
    shape = case("qwen2.5-7b", 2, world=WORLD, micro_batches=2, tokens=4096)
    (found,) = fake_cuda.trace(shape, timeout=seconds(1500))
    setup = setup_of("qwen2.5-7b", 2, tokens=4096)
    check(predicted(setup), found)
    # The comparison is its own control: it fails by far if Adam's states are forgotten.
    with pytest.raises(AssertionError):
        check(predicted(setup, forgets=["Adam's states"]), found)
    kept = trunk_bytes(setup.actor, 4096, 2) + 2 * 4095 * setup.actor.size.hidden
    assert kept == pytest.approx(found["kept"], rel=0.02)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_offloaded_states_travel_through_pinned_memory_and_nobody_waits():
    found = fake_cuda.run("trace_offload.py")
    assert found["cpu"]["devices"] == ["cpu"]
    assert found["cuda"]["devices"] == ["cuda"]
    # Both moments of weight and bias; the second entry: pinned, or without waiting.
    assert found["cpu"]["operators"] == [["empty_like", True], ["copy_", True]] * 4
    assert found["cuda"]["operators"] == [["_to_copy", True]] * 4


def test_a_size_counts_what_transformers_builds():
    import torch
    import transformers

    for name, layers in (("qwen2.5-0.5b", 2), ("qwen3-8b", 2)):
        wanted = case(name, layers)
        with torch.device("meta"):
            config = getattr(transformers, wanted["kind"])(**wanted["config"])
            model = transformers.AutoModelForCausalLM.from_config(config)
        size = ModelSize.of_config(config.to_dict())
        assert size.parameters == sum(p.numel() for p in model.parameters())
        assert size == replace(SHAPES[name], num_layers=layers)
