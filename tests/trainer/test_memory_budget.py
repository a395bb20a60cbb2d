"""At its start a run compares its needs with the machine: less for the engine, or no start."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.strategy import get_fake_strategy
from lightrft.tools.plan.memory import (
    LARGEST_BUDGET,
    fitting_budget,
    gigabytes,
    plan_memory,
    with_tokens,
)
from lightrft.tools.plan.setup import PLANNED, Setup
from lightrft.tools.plan.sizes import SHAPES, ModelSize, read_model_size
from lightrft.tools.plan.start_check import check_budget, is_hopeless, machine_setup, settle


def setup_of(name, gpus, num_gigabytes, *, has_gpu=True, **options):
    config = TrainConfig(engine_type="vllm", **options)
    return Setup(config, SHAPES[name], gpus, gpus, has_gpu, num_gigabytes * 1e9, "vllm")


def test_what_fits_is_left_alone():
    lines = []
    setup = setup_of("qwen2.5-0.5b", 1, 80, micro_batch_tokens=4096)
    assert settle(setup, lines.append) is setup.config
    assert len(lines) == 1
    assert lines[0].startswith("memory: largest phase")


@pytest.mark.parametrize("gigabytes_each", [24, 40, 80, 141])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"])
@pytest.mark.parametrize("stage", ["policy", "sft", "prefer", "reward"])
def test_a_budget_is_the_largest_power_of_two_that_fits(name, gigabytes_each, stage):
    config = TrainConfig(engine_type="vllm", fsdp=True, train_batch_size=256)
    machine = (SHAPES[name], 8, 8, True, gigabytes_each * 1e9, "vllm")
    setup = Setup(config, *machine, stage=stage, rows_per_item=PLANNED[stage])
    tokens, least = fitting_budget(setup), setup.item_tokens
    assert tokens & (tokens - 1) == 0 or tokens in (least, setup.batch_tokens)
    assert least <= tokens <= min(LARGEST_BUDGET, setup.batch_tokens)

    def fits(budget):
        plan = plan_memory(with_tokens(setup, budget))
        passes = [each for each in plan.phases if each.name in ("score", "train")]
        return max(1.1 * each.device_bytes for each in passes) <= plan.usable_bytes

    assert tokens == least or fits(tokens)
    larger = min(2 ** tokens.bit_length(), LARGEST_BUDGET, setup.batch_tokens)
    assert larger == tokens or not fits(larger)


def test_ranks_take_the_least_of_their_budgets(tmp_path):
    lines = []
    setup = setup_of("qwen2.5-0.5b", 2, 80, fsdp=True)
    config = settle(setup, lines.append, agree=lambda tokens: min(tokens, 4096))
    assert config.micro_batch_tokens == 4096
    assert lines[0].startswith("micro_batch_tokens = 4096: the peak of train is planned at ")
    train = plan_memory(replace(setup, config=config)).phases[3]
    assert gigabytes(train.device_bytes) in lines[0]


def test_an_engine_that_fills_the_device_while_it_samples_leaves_the_budget_alone():
    setup = setup_of("qwen2.5-7b", 1, 80, fsdp=True, lora_rank=16, engine_mem_util=0.75)
    plan = plan_memory(setup)
    assert plan.worst.name == "rollout"
    assert 1.1 * plan.worst.device_bytes > plan.usable_bytes
    assert fitting_budget(setup) > 2048


def test_on_a_cpu_no_budget_is_chosen():
    setup = setup_of("qwen2.5-0.5b", 1, 80, has_gpu=False)
    assert settle(setup, lambda text: None).micro_batch_tokens is None


def test_the_engine_gets_what_the_trainer_leaves():
    lines = []
    setup = setup_of("qwen2.5-7b", 8, 80, init_kl_coef=0.01)
    assert not plan_memory(setup).fits
    config = settle(setup, lines.append)
    assert 0.3 < config.engine_mem_util < 0.5
    assert "engine_mem_util" in lines[0]
    assert plan_memory(Setup(config, SHAPES["qwen2.5-7b"], 8, 8, True, 80e9, "vllm")).fits


@pytest.mark.full
def test_what_cannot_fit_is_refused_with_the_sum_and_remedies():
    with pytest.raises(MemoryError, match="needs more memory than its GPUs have") as caught:
        settle(setup_of("qwen2.5-32b", 8, 80), lambda text: None)
    text = str(caught.value)
    assert "Adam's states" in text
    assert "feasible settings: --" in text
    assert "--no_check_memory" in text


def test_a_host_is_only_warned_about():
    lines = []
    setup = setup_of("qwen2.5-7b", 2, 16, has_gpu=False)
    assert settle(setup, lines.append) is setup.config
    assert any("may run out of memory" in line for line in lines)


def test_a_gpu_that_two_ranks_share_holds_both(monkeypatch):
    """The engine of another process has the share that was given: nothing here can change it."""
    monkeypatch.setattr("lightrft.tools.plan.start_check.read_model_size", lambda _: SIZE)
    gpu = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    context = SimpleNamespace(
        device=torch.device("cuda"), world_size=1, all_reduce=lambda value, op: value
    )

    def planned(**options):
        options |= {"fsdp": True, "rollout_ranks": 1, "rollout_lag": 1, "engine_mem_util": 0.9}
        options |= {"gradient_checkpointing": True, "generate_max_len": 512}
        config = TrainConfig(engine_type="vllm", enable_engine_sleep=False, **options)
        return plan_memory(machine_setup(config, context))

    apart, shared = planned(), planned(devices_shared=True)
    assert apart.problems == []
    assert shared.worst.device_bytes - apart.worst.device_bytes > 0.8 * 80e9
    assert not shared.fits
    lines = []
    with pytest.raises(MemoryError):
        settle(shared.setup, lines.append)
    assert not any("instead of" in line for line in lines)


SIZE = SHAPES["qwen2.5-1.5b"]


class Inputs:
    """Rows of two answers, the longest of 700 tokens."""

    def items(self):
        rows = [SimpleNamespace(token_ids=np.zeros(n, np.int32)) for n in (3, 700)]
        return [rows, rows[:1]]


def checked(tmp_path, capsys, stage, values, **options):
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = TrainConfig(pretrain=str(tmp_path), max_row_tokens=4096, **options)
    with get_fake_strategy(config) as strategy:
        assert check_budget(config, strategy, stage=stage, inputs=Inputs()) is config
    return capsys.readouterr().out


def test_a_start_on_given_rows_counts_the_rows_that_there_are(tmp_path, capsys):
    values = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 500,
    }
    said = checked(tmp_path, capsys, "prefer", values)
    config = TrainConfig(pretrain=str(tmp_path), max_row_tokens=4096)
    size = ModelSize.of_config(values)
    given = {"stage": "prefer", "rows_per_item": 2, "longest_row": 700}
    plan = plan_memory(Setup(config, size, 1, 1, False, 1e12, "hf", **given))
    assert f"largest phase train: {gigabytes(plan.worst.device_bytes)} of" in said
    assert checked(tmp_path, capsys, "toy", values) == ""
    assert checked(tmp_path, capsys, "prefer", values, check_memory=False) == ""


def test_a_model_of_unknown_sizes_is_trained_without_a_plan(tmp_path, capsys):
    for stage in ("sft", "policy"):
        said = checked(tmp_path, capsys, stage, {"n_embd": 64})
        assert "memory is not planned: the configuration of the model has no" in said


OTHER_NAMES = {
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 3},
    "gpt_neo": {
        "hidden_size": 32,
        "num_heads": 2,
        "num_layers": 3,
        "attention_types": [[["global", "local", "global"], 1]],
    },
    "bloom": {"hidden_size": 32, "n_head": 2, "n_layer": 3},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 3},
    "ctrl": {"n_embd": 32, "dff": 128, "n_head": 2, "n_layer": 3},
    "xglm": {"d_model": 32, "ffn_dim": 128, "attention_heads": 2, "num_layers": 3},
    "dbrx": {
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 3,
        "attn_config": {"kv_n_heads": 1},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
}


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_sizes_are_read_by_whatever_names_a_family_has_for_them(tmp_path, family):
    config = AutoConfig.for_model(family, vocab_size=400, **OTHER_NAMES[family])
    config.save_pretrained(tmp_path)
    size = read_model_size(str(tmp_path))
    assert (size.num_layers, size.hidden, size.num_heads, size.vocab) == (3, 32, 2, 400)
    if family == "dbrx":  # transformers builds none
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(p.numel() for name, p in model.named_parameters() if re.search(r"\.\d+\.", name))
    assert size.num_layers * size.layer_parameters == pytest.approx(layers, rel=0.05)


def test_a_cache_counts_while_the_embedded_engine_samples_and_not_where_others_sample():
    def names(phase, engine):
        plan = plan_memory(replace(setup_of("qwen2.5-7b", 8, 80, fsdp=True), engine=engine))
        terms = next(each for each in plan.phases if each.name == phase).terms
        return {term.name for term in terms if term.name.startswith("engine: ") and term.num_bytes}

    assert names("rollout", "hf") == {"engine: weights", "engine: keys and values"}
    assert names("train", "hf") == {"engine: weights"}
    assert names("rollout", "") == names("train", "") == set()


def test_zero_in_bfloat16_which_no_device_was_traced_for_is_refused_later_and_says_so(capsys):
    def is_refused(over, **options):
        setup = replace(setup_of("qwen2.5-7b", 8, 80, **options), engine="hf")
        need = plan_memory(setup).worst.device_bytes
        return is_hopeless(plan_memory(replace(setup, capacity_bytes=need / over / 0.95)))

    zero, fsdp = {"zero_stage": 2}, {"fsdp": True}
    assert [is_refused(over, **fsdp) for over in (1.05, 1.2, 1.4)] == [False, True, True]
    assert [is_refused(over, **zero) for over in (1.05, 1.2, 1.4)] == [False, False, True]
    assert is_refused(1.2, bf16=False, **zero)
    main(["plan", "--pretrain", "qwen2.5-7b", "--gpus", "8"])
    assert "ZeRO in bfloat16 were compared with this sum on CPUs alone" in capsys.readouterr().out
    main(["plan", "--pretrain", "qwen2.5-7b", "--gpus", "8", "--fsdp"])
    assert "on CPUs alone" not in capsys.readouterr().out
