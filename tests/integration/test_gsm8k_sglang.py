"""`lightrft train --engine_type sglang` on real questions, with a reward from a user's file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

REWARD = """
def share_of_digits(prompts, responses, labels, **columns):
    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]
"""


def run_lightrft(*arguments, timeout_seconds=900.0):
    done = subprocess.run(
        [sys.executable, "-m", "lightrft.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (
        f"exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


def saved_model_hash(directory):
    """The model hash of a checkpoint on disk, from its own bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrft.kernels import hash_tensor
    from lightrft.strategy.weight_sync.verification import model_hash

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model_hash({name: hash_tensor(p.detach()) for name, p in model.named_parameters()})


@pytest.mark.sglang
@pytest.mark.timeout(1000)
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(("--nproc_per_node", 1), id="one-rank"),
        pytest.param(("--nproc_per_node", 2), id="two-ranks"),
    ],
)
def test_three_steps_on_real_questions_with_sglang(placement, test_data, tmp_path):
    model, run, reward = tmp_path / "tiny", tmp_path / "run", tmp_path / "reward.py"
    reward.write_text(REWARD)
    run_lightrft("init-model", model, "--preset", "tiny-qwen3", "--seed", 0)
    output = run_lightrft(
        "train", "--fsdp", *placement, "--pretrain", model, "--engine_type", "sglang",
        "--prompt_data", test_data / "gsm8k" / "train.jsonl",
        "--input_key", "question", "--label_key", "answer", "--apply_chat_template",
        "--max_samples", 64, "--prompt_max_len", 512, "--generate_max_len", 24,
        "--reward_fn", f"{reward}:share_of_digits",
        "--advantage_estimator", "group_norm", "--init_kl_coef", 0,
        "--rollout_batch_size", 4, "--n_samples_per_prompt", 4,
        "--train_batch_size", 16, "--micro_train_batch_size", 4, "--micro_rollout_batch_size", 8,
        "--actor_learning_rate", 1e-3, "--lr_warmup_ratio", 0,
        "--output_dir", run, "--max_steps", 3,
    )  # fmt: skip
    # The gate compared the first step, and raises above 1e-4 in the mean.
    assert "parity: engine and trainer logprobs of " in output
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["weights_version"] for row in steps] == [1, 2, 3]
    assert all(row["reward_std"] > 0 and row["grad_norm"] > 0 for row in steps)
    assert len({row["engine_hash"] for row in steps}) == 3
    assert steps[-1]["engine_hash"] == saved_model_hash(run / "model")
    assert all(math.isfinite(row["grad_norm"]) for row in steps)
    assert all(row["logprob_diff_max"] < 1e-4 for row in steps)
    assert all(row["logprob_pearson"] > 0.999 for row in steps)
