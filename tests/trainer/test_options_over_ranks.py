"""Options whose work spans ranks give the same run on one and on two processes."""

import pytest
import torch
from tests.runs import (
    assert_same,
    last_metrics,
    rollout_options,
    say_rows,
    train_on_ranks,
    write,
    write_inputs,
)
from transformers import AutoModelForSequenceClassification

from lightrft.tools.model_presets import PRESETS, byte_level_tokenizer

pytestmark = pytest.mark.deepspeed

REWARD = """
def score(responses, kind):
    return [
        1.0 if k % 2 else float(sum(map(ord, text)) % 2)
        for text, k in zip(responses, kind, strict=True)
    ]
"""
FULL_GROUPS = {"dynamic_sampling": True, "use_fire": True, "train_batch_size": 16}
RUNS = (
    {
        "high_entropy_token_ratio": 0.4,
        "off_policy_correction": "tis",
        "micro_batch_tokens": 60,
        "dual_clip": 3.0,
        "policy_loss": "dapo",
    },
    FULL_GROUPS,
    {
        "dynamic_sampling": True,
        "max_num_gen_batches": 1,
        "advantage_estimator": "gae",
        "freezing_actor_steps": 1,
        "init_kl_coef": 0.0,
        "use_kl_loss": False,
    },
    FULL_GROUPS | {"fsdp": False},
    {
        "stream_chunk": 3,
        "stream_prompts": 6,
        "off_policy_correction": "tis",
        "fsdp": False,
        "zero_stage": 1,
    },
)


def options_of(folder, name, **changes):
    common = {
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "loss_agg_mode": "token-mean",
        "critic_learning_rate": 1e-3,
    }
    return rollout_options(folder, name, **common | changes)


def features(folder):
    """Adapters, texts and a reward model that counts for one of two tasks."""
    return {
        "lora_rank": 4,
        "pretrain_data": str(folder / "texts.jsonl"),
        "ptx_coef": 0.1,
        "ptx_batch_size": 3,
        "reward_pretrain": (str(folder / "scorer"),),
        "reward_recipe": str(folder / "recipes.toml"),
        "eval_data": str(folder / "train.jsonl"),
        "max_eval_samples": 5,
    }


@pytest.fixture
def folder(tmp_path, tiny_model):
    rows = say_rows(32, kind=lambda number: number, task=lambda number: "ab"[number % 2])
    recipes = "[a]\nscore = 1\n[b]\nscore = 1\nmodel = 0.2\n"
    write_inputs(tmp_path, rows, reward=REWARD, files={"recipes.toml": recipes})
    write(tmp_path / "texts.jsonl", [{"text": "the quick brown fox "[: 5 + i]} for i in range(7)])
    (tmp_path / "model").symlink_to(tiny_model)
    torch.manual_seed(4)
    config = PRESETS["tiny-qwen3"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "scorer")
    byte_level_tokenizer().save_pretrained(tmp_path / "scorer")
    return tmp_path


@pytest.mark.full
def test_two_processes_agree_with_one(folder):
    alone, both = (
        train_on_ranks(
            size,
            [
                options_of(folder, f"{size}_{number}", **run)
                for number, run in enumerate((*RUNS, features(folder)))
            ],
            timeout_seconds=400,
        )
        for size in (1, 2)
    )
    alone, *both = ([each["last_metrics"] for each in rank] for rank in (*alone, *both))
    first, second = (
        [{name: v for name, v in each.items() if "second" not in name} for each in rank]
        for rank in both
    )
    assert first == second
    # One process shares the frozen weights of adapters with its engine; two have shards of them.
    assert alone[-1].pop("weight_sync_bytes") < both[0][-1].pop("weight_sync_bytes")
    for expected, metrics in zip(alone, both[0], strict=True):
        assert_same(expected, metrics)
    # The engine samples from the weights of the update before.
    assert all(metrics["logprob_diff_max"] < 1e-4 for metrics in alone[:4])
    assert alone[0]["high_entropy_share"] < 0.7
    assert alone[1]["dynamic/num_gen_batches"] > 1
    assert alone[2]["dynamic/filler_share"] > 0
    assert alone[3]["dynamic/num_gen_batches"] > 1
    assert alone[4]["staleness/token_share"] > 0  # rows went on over an update
    assert alone[5]["ptx_loss"] > 1
    assert 0 != alone[5]["reward/model"] != alone[5]["reward/score"]


@pytest.mark.full
def test_adapters_of_the_engine_alone_resume_and_sample_as_merged_weights_do(folder):
    pytest.importorskip("peft", reason="package peft is not installed")

    def run(name, **changes):
        adapters = {"lora_rank": 4, "lora_alpha": 16.0, "lora_sync": "adapter"} | changes
        return rollout_options(folder, name, lr_scheduler="constant", **adapters)

    expected = last_metrics(1, [run("alone")])[0]
    adapters, _, resumed, merged, zero3 = last_metrics(
        2,
        [
            run("whole"),
            run("half", max_steps=1),
            run("half", load_checkpoint=True),
            run("merged", lora_sync="merged"),
            run("zero3", fsdp=False, zero_stage=3),
        ],
        timeout_seconds=400,
    )
    for metrics in (adapters, resumed, zero3):
        assert_same(expected, metrics)
    assert adapters.pop("weight_sync_bytes") < 0.5 * merged.pop("weight_sync_bytes")
    assert_same(adapters, merged)
    assert adapters["weights_changed"] == 1


@pytest.mark.full
def test_a_base_of_4_bits_has_a_reference_resumes_and_is_the_same_on_two_ranks(folder):
    pytest.importorskip("bitsandbytes", reason="package bitsandbytes is not installed")

    def run(name, **changes):
        options = {"lora_rank": 4, "quantize": "nf4", "init_kl_coef": 0.05, "use_kl_loss": True}
        return rollout_options(folder, name, lr_scheduler="constant", **options | changes)

    expected = last_metrics(1, [run("one")])[0]
    whole, _, resumed, dense = last_metrics(
        2,
        [
            run("whole"),
            run("half", max_steps=1),
            run("half", load_checkpoint=True),
            run("dense", lora_sync="merged"),
        ],
        timeout_seconds=400,
    )
    assert whole["logprob_diff_mean"] < 1e-5
    # Frozen weights are shared, resident, or sent dequantised and with their adapters.
    sizes = [each.pop("weight_sync_bytes") for each in (expected, whole, resumed, dense)]
    assert sizes[0] == sizes[1] < 0.5 * sizes[3]
    assert_same(whole, resumed)
    assert_same(whole, dense)
    assert_same(expected, whole)
    assert 0 < whole["kl"] < 0.1


@pytest.mark.vllm
@pytest.mark.parametrize(
    "size, changes",
    [(2, {}), pytest.param(2, {"fsdp": False, "zero_stage": 2}, marks=pytest.mark.full)],
    ids=["fsdp2", "zero2"],
)
def test_vllm_takes_the_adapters_of_ranks(folder, size, changes):
    if "zero_stage" in changes:
        pytest.importorskip("deepspeed", reason="package deepspeed is not installed")
    adapters = {"lora_rank": 4, "lora_alpha": 16.0, "lora_sync": "adapter"} | changes
    engine = {"engine_type": "vllm", "engine_mem_util": 0.1}
    (metrics,) = last_metrics(size, [rollout_options(folder, **adapters, **engine)])
    assert 0 < metrics["weight_sync_bytes"] < 1e6
    assert metrics["logprob_diff_mean"] < 1e-4
    assert metrics["weights_changed"] == 1


@pytest.mark.vllm
@pytest.mark.full
def test_a_run_goes_on_with_what_it_shares_with_vllm(folder):
    def run(name, **changes):
        options = {"lora_rank": 4, "lora_alpha": 16.0, "lora_sync": "adapter"}
        options |= {"engine_type": "vllm", "engine_mem_util": 0.1, "init_kl_coef": 0.05}
        return rollout_options(folder, name, lr_scheduler="constant", **options | changes)

    runs = [run("whole"), run("half", max_steps=1), run("half", load_checkpoint=True)]
    whole, _, resumed = last_metrics(1, runs, timeout_seconds=400)
    assert_same(whole, resumed)
    assert whole["kl"] != 0
