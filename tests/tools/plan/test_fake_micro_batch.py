"""A whole micro batch on device cuda without a GPU: forward, head, loss, backward, optimizer."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from tests.machine import seconds

from lightrft.config import TrainConfig
from lightrft.tools.plan.memory import moments, resting, trunk_bytes
from lightrft.tools.plan.setup import Setup
from lightrft.tools.plan.sizes import SHAPES, ModelSize

pytestmark = pytest.mark.shard("planning_fake")

spec = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).parent / "fake_cuda.py")
fake_cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_cuda)

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


def setup_of(name, layers, *, tokens, checkpointing=False, world=WORLD):
    config = TrainConfig(
        fsdp=True,
        init_kl_coef=0,
        prompt_max_len=1,
        generate_max_len=tokens - 1,
        gradient_checkpointing=checkpointing,
        micro_train_batch_size=1,
    )
    size = replace(SHAPES[name], num_layers=layers)
    return Setup(config, size, world, world, True, 80e9, "hf")


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


def variants(name, layers):
    return [
        case(
            name,
            layers,
            tokens=256,
            rows=2,
            padding=56,
            prompt=32,
            packed=packed,
            lora=lora,
            checkpointing=checkpointing,
        )
        for packed in (False, True)
        for lora in (False, True)
        for checkpointing in (False, True)
    ]


@pytest.mark.full
def test_no_tensor_of_the_host_takes_part_in_a_micro_batch():
    both = variants("qwen2.5-7b", 2)
    check_variants([both[0], both[-1]])  # padded; packed with adapters and checkpointing


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_no_tensor_of_the_host_takes_part_in_any_micro_batch_of_a_7b_shape():
    check_variants(variants("qwen2.5-7b", 2))


def check_variants(cases):
    for seen, wanted in zip(fake_cuda.trace(*cases, timeout=seconds(1500)), cases, strict=True):
        assert seen["foreign"] == [], wanted
        assert seen["scored"] == 256 + 200 - 2 * 32
        assert seen["peak"] > seen["kept"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_no_tensor_of_the_host_takes_part_in_a_micro_batch_of_qwen3():
    check_variants(variants("qwen3-0.6b", 28))


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


def compare(name, depths, **options):
    """Plans of some numbers of layers against their traces, which one process makes."""
    cases = [case(name, depth, world=WORLD, micro_batches=2, **options) for depth in depths]
    traces = fake_cuda.trace(*cases, timeout=seconds(1500))
    for depth, found in zip(depths, traces, strict=True):
        setup = setup_of(name, depth, **options)
        check(predicted(setup), found)
        # Every comparison is its own control: it fails by far if Adam's states are forgotten.
        forgetful = predicted(setup, forgets=["Adam's states"])
        with pytest.raises(AssertionError):
            check(forgetful, found)
        assert forgetful[0] < 0.5 * found["resting"]
    return traces


def check(prediction, found):
    states, peak = prediction
    assert states == pytest.approx(found["resting"], rel=0.01), states / found["resting"]
    total = found["resting"] + found["peak"]
    assert states + peak == pytest.approx(total, rel=0.10), (states + peak) / total


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_plan_of_a_7b_shape_over_8_ranks_is_within_a_tenth_of_the_trace():
    (found,) = compare("qwen2.5-7b", [2], tokens=4096)
    setup = setup_of("qwen2.5-7b", 2, tokens=4096)
    kept = trunk_bytes(setup.actor, 4096, 2) + 2 * 4095 * setup.actor.size.hidden
    assert kept == pytest.approx(found["kept"], rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-0.6b"]
)
def test_plans_of_all_shapes_are_within_a_tenth_of_the_trace(name, checkpointing):
    # From two numbers of layers follows any: what a layer adds is a constant.
    few, more = map(_total, compare(name, [3, 5], tokens=8192, checkpointing=checkpointing))
    slope = [(b - a) / 2 for a, b in zip(few, more, strict=True)]
    depth = SHAPES[name].num_layers
    resting_bytes, peak = (
        value + (depth - 5) * each for value, each in zip(more, slope, strict=True)
    )
    setup = setup_of(name, depth, tokens=8192, checkpointing=checkpointing)
    states, added = predicted(setup)
    assert states + added == pytest.approx(resting_bytes + peak, rel=0.10)


def _total(found):
    return found["resting"], found["peak"]


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
