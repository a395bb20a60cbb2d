"""Options whose work spans ranks give the same run on one and on two processes."""

import json

import pytest
import torch
from tests.ranks import run_multiprocess

pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed]

REWARD = """
def score(responses, kind):
    return [
        1.0 if k % 2 else float(sum(map(ord, text)) % 2)
        for text, k in zip(responses, kind, strict=True)
    ]
"""
RUNS = (
    {
        "high_entropy_token_ratio": 0.4,
        "off_policy_correction": "tis",
        "micro_batch_tokens": 60,
        "dual_clip": 3.0,
        "policy_loss": "dapo",
    },
    {"dynamic_sampling": True, "use_fire": True, "train_batch_size": 16},
    {
        "dynamic_sampling": True,
        "max_num_gen_batches": 1,
        "advantage_estimator": "gae",
        "freezing_actor_steps": 1,
        "init_kl_coef": 0.0,
        "use_kl_loss": False,
    },
    {"dynamic_sampling": True, "use_fire": True, "train_batch_size": 16, "fsdp": False},
    {
        "stream_chunk": 3,
        "stream_prompts": 6,
        "off_policy_correction": "tis",
        "fsdp": False,
        "zero_stage": 1,
    },
    {
        "lora_rank": 4,
        "pretrain_data": "texts.jsonl",
        "ptx_coef": 0.1,
        "ptx_batch_size": 3,
        "reward_pretrain": ("reward_model",),
        "reward_recipe": "recipes.toml",
        "eval_data": "train.jsonl",
        "max_eval_samples": 5,
    },
)
FILES = ("pretrain_data", "reward_pretrain", "reward_recipe", "eval_data")


def train_each(rank, world_size, runs):
    from dataclasses import asdict

    import torch.distributed as dist

    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training

    # Kept over all runs: to end one and start the next at the same address is a race.
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def settings(folder, model, world_size):
    common = {
        "pretrain": model,
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "fsdp": True,
        "bf16": False,
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "generate_max_len": 8,
        "prompt_max_len": 32,
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "loss_agg_mode": "token-mean",
        "actor_learning_rate": 1e-3,
        "max_steps": 2,
        "critic_learning_rate": 1e-3,
    }
    return [
        {**common, "output_dir": str(folder / f"run_{world_size}_{i}"), **placed(run, folder)}
        for i, run in enumerate(RUNS)
    ]


def placed(run, folder):
    """The options with the files of this test."""

    def place(value):
        return str(folder / value) if isinstance(value, str) else tuple(map(place, value))

    return {name: place(v) if name in FILES else v for name, v in run.items()}


def write_inputs(folder):
    from transformers import AutoModelForSequenceClassification

    from lightrft.tools.model_presets import PRESETS, byte_level_tokenizer

    rows = [
        {"prompt": f"say {'aeiou'[i % 5] * (1 + i % 3)}", "kind": i, "task": "ab"[i % 2]}
        for i in range(32)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"text": "the quick brown fox "[: 5 + i]} for i in range(7)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipes.toml").write_text("[a]\nscore = 1\n[b]\nscore = 1\nmodel = 0.2\n")
    torch.manual_seed(4)
    config = PRESETS["tiny-qwen3"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward_model")
    byte_level_tokenizer().save_pretrained(folder / "reward_model")


@pytest.mark.full
def test_two_processes_agree_with_one(tmp_path, tiny_model):
    write_inputs(tmp_path)
    (alone,) = run_multiprocess(
        train_each, 1, timeout_seconds=400, args=(settings(tmp_path, tiny_model, 1),)
    )
    both = run_multiprocess(
        train_each, 2, timeout_seconds=400, args=(settings(tmp_path, tiny_model, 2),)
    )
    assert [{n: v for n, v in m.items() if "second" not in n} for m in both[0]] == [
        {n: v for n, v in m.items() if "second" not in n} for m in both[1]
    ]
    for expected, found in zip(alone, both[0], strict=True):
        assert set(expected) == set(found)
        for name, value in expected.items():
            if "second" in name or name == "engine_hash" or name.startswith("memory/"):
                continue
            is_rounding = any(word in name for word in ("max", "min", "diff", "log_ratio"))
            tolerance = 1e-4 if is_rounding else 1e-6
            assert found[name] == pytest.approx(value, rel=1e-3, abs=tolerance), name
    assert alone[0]["high_entropy_share"] < 0.7
    assert alone[1]["dynamic/num_gen_batches"] > 1
    assert alone[2]["dynamic/filler_share"] > 0
    assert alone[3]["dynamic/num_gen_batches"] > 1
    assert alone[4]["staleness/token_share"] > 0  # rows went on over an update
    assert alone[5]["ptx_loss"] > 1
    assert alone[5]["reward/model"] != 0
