"""Whole runs with options that bring models, data or state of their own; two ranks and resumes."""

from __future__ import annotations

import json

import pytest
from tests.ranks import run_multiprocess

from lightrft.config import TrainConfig

pytestmark = [pytest.mark.shard("training"), pytest.mark.multiprocess, pytest.mark.deepspeed]

REWARD = """
def score(responses, kind):
    return [
        1.0 if k % 2 else float(sum(map(ord, text)) % 2)
        for text, k in zip(responses, kind, strict=True)
    ]
"""


def write_inputs(folder):
    rows = [
        {"prompt": f"say {'aeiou'[i % 5] * (1 + i % 3)}", "kind": i, "task": "ab"[i % 2]}
        for i in range(32)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"text": "the quick brown fox "[: 5 + i]} for i in range(7)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "reward.py").write_text(REWARD)


def options(folder, model, name, **changes):
    return {
        "pretrain": model,
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "bf16": False,
        "engine_type": "hf",
        "output_dir": str(folder / name),
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "generate_max_len": 8,
        "prompt_max_len": 32,
        "init_kl_coef": 0.0,
        "actor_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0,
        "lr_scheduler": "constant",
        "max_steps": 2,
        **changes,
    }


def train_each(rank, world_size, runs):
    from dataclasses import asdict

    import torch.distributed as dist

    from lightrft.run.assembly import run_training

    # Kept over all runs: to end one and start the next at the same address is a race.
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    summaries = [asdict(run_training(TrainConfig(**values))) for values in runs]
    return [{**summary["last_metrics"], **summary["last_eval"]} for summary in summaries]


def same(first, second, *, rel=1e-3):
    """Metrics of two runs that must do the same."""
    skipped = ("second", "engine_hash", "memory/", "mfu")
    assert set(first) == set(second)
    for name, value in first.items():
        if not any(word in name for word in skipped):
            is_rounding = any(
                word in name for word in ("max", "min", "diff", "log_ratio", "parity")
            )
            tolerance = 1e-4 if is_rounding else 1e-6
            assert second[name] == pytest.approx(value, rel=rel, abs=tolerance), name


def write_reward_model(folder):
    import torch
    from transformers import AutoModelForSequenceClassification

    from lightrft.tools.model_presets import PRESETS, byte_level_tokenizer

    torch.manual_seed(4)
    config = PRESETS["tiny-qwen3"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return str(folder)


def all_features(folder, model, backend, name, **changes):
    """Adapters, texts and a reward model that counts for one of two tasks."""
    reward_model = folder / "reward_model"
    if not reward_model.exists():
        write_reward_model(reward_model)
        (folder / "recipes.toml").write_text("[a]\nscore = 1\n[b]\nscore = 1\nmodel = 0.2\n")
    return options(
        folder,
        model,
        f"{backend}_{name}",
        lora_rank=4,
        pretrain_data=str(folder / "texts.jsonl"),
        ptx_coef=0.1,
        ptx_batch_size=3,
        fsdp=backend == "fsdp",
        reward_pretrain=(str(reward_model),),
        reward_recipe=str(folder / "recipes.toml"),
        eval_data=str(folder / "train.jsonl"),
        max_eval_samples=5,
        **changes,
    )


def runs_of(folder, model, backend, world):
    """A run of two steps, and the same in two halves."""
    whole = all_features(folder, model, backend, f"whole_{world}")
    half = {**whole, "output_dir": str(folder / f"{backend}_half_{world}"), "max_steps": 1}
    return [whole, half, {**half, "max_steps": 2, "load_checkpoint": True}]


@pytest.mark.slow
def test_two_ranks_agree_with_one_and_resume(tmp_path, tiny_model):
    write_inputs(tmp_path)
    cells = runs_of(tmp_path, tiny_model, "fsdp", 2)
    (alone,) = run_multiprocess(
        train_each, 1, timeout_seconds=300, args=(runs_of(tmp_path, tiny_model, "fsdp", 1)[:1],)
    )
    both, _ = run_multiprocess(train_each, 2, timeout_seconds=400, args=(cells,))
    same(both[0], both[2], rel=1e-6)
    same(alone[0], both[0])
    assert both[0]["ptx_loss"] > 1
    assert both[0]["reward/model"] != both[0]["reward/score"]
    assert both[0]["eval/model"] != 0


@pytest.mark.slow
def test_zero_agrees_with_fsdp2_on_one_rank_and_two(tmp_path, tiny_model):
    write_inputs(tmp_path)

    def cells(world):
        fsdp = runs_of(tmp_path, tiny_model, "fsdp", world)[:1]
        return fsdp + runs_of(tmp_path, tiny_model, "zero2", world)

    (alone,) = run_multiprocess(train_each, 1, timeout_seconds=300, args=(cells(1),))
    both, _ = run_multiprocess(train_each, 2, timeout_seconds=400, args=(cells(2),))
    for found in (alone, both):
        same(found[1], found[3], rel=1e-6)
        same(found[0], found[1])
    same(alone[1], both[1])
