"""Whole runs with options that bring models, data or state of their own; two ranks and resumes."""

from __future__ import annotations

import json

import pytest

from lightrft.strategy.testing import run_multiprocess
from lightrft.trainer.config import TrainConfig

pytestmark = [pytest.mark.multiprocess, pytest.mark.deepspeed]

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
        "pretrain": model, "prompt_data": str(folder / "train.jsonl"), "input_key": "prompt",
        "reward_fn": (f"{folder / 'reward.py'}:score",), "bf16": False, "engine_type": "hf",
        "output_dir": str(folder / name), "rollout_batch_size": 4, "n_samples_per_prompt": 4,
        "train_batch_size": 8, "micro_train_batch_size": 2, "generate_max_len": 8,
        "prompt_max_len": 32, "init_kl_coef": 0.0, "actor_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0, "lr_scheduler": "constant", "max_steps": 2, **changes,
    }  # fmt: skip


def train_each(rank, world_size, runs):
    from dataclasses import asdict

    import torch.distributed as dist

    from lightrft.trainer.assembly import run_training

    # Kept over all runs: to end one and start the next at the same address is a race.
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def same(first, second, *, rel=1e-3):
    """Metrics of two runs that must do the same."""
    skipped = ("second", "engine_hash", "memory/", "mfu")
    assert set(first) == set(second)
    for name, value in first.items():
        if not any(word in name for word in skipped):
            tolerance = 1e-4 if "max" in name or "diff" in name else 1e-6
            assert second[name] == pytest.approx(value, rel=rel, abs=tolerance), name


def lora_and_texts(folder, model, backend, name, **changes):
    return options(
        folder, model, f"{backend}_{name}", lora_rank=4, pretrain_data=str(folder / "texts.jsonl"),
        ptx_coef=0.1, ptx_batch_size=3, fsdp=backend == "fsdp", **changes,
    )  # fmt: skip


def test_adapters_and_texts_agree_over_ranks_and_backends_and_resume(tmp_path, tiny_model):
    write_inputs(tmp_path)

    def cells(world):
        found = []
        for backend in ("fsdp", "zero2"):
            whole = lora_and_texts(tmp_path, tiny_model, backend, f"whole_{world}")
            half = {
                **whole,
                "output_dir": str(tmp_path / f"{backend}_half_{world}"),
                "max_steps": 1,
            }
            found += [whole, half, {**half, "max_steps": 2, "load_checkpoint": True}]
        return found

    (alone,) = run_multiprocess(train_each, 1, timeout_seconds=300, args=(cells(1),))
    both, _ = run_multiprocess(train_each, 2, timeout_seconds=400, args=(cells(2),))
    for runs in (alone, both):
        for whole, _, resumed in (runs[:3], runs[3:]):
            same(whole, resumed, rel=1e-6)
        same(runs[0], runs[3])
        assert runs[0]["ptx_loss"] > 1
    same(alone[0], both[0])
    same(alone[3], both[3])
