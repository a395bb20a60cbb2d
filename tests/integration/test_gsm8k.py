"""`lightrft train` on real questions, with a reward from a user's file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

REWARD = """
def share_of_digits(prompts, responses, labels, **columns):
    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]
"""


def run_lightrft(*arguments, timeout_seconds=280.0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lightrft.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, (
        f"exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    run_lightrft("init-model", directory, "--preset", "tiny-qwen3", "--seed", 0)
    return directory


def metrics_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row], rows


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(("--fsdp",), id="fsdp2"),
        pytest.param(("--zero_stage", "2"), id="zero2", marks=pytest.mark.deepspeed),
    ],
)
def test_three_steps_on_real_questions(backend, num_processes, tiny_model, test_data, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    run = tmp_path / "run"
    command = (
        "train", *backend, "--nproc_per_node", num_processes,
        "--pretrain", tiny_model, "--engine_type", "hf",
        "--prompt_data", test_data / "gsm8k" / "train.jsonl",
        "--eval_data", test_data / "gsm8k" / "test.jsonl", "--max_eval_samples", 6,
        "--input_key", "question", "--label_key", "answer", "--apply_chat_template",
        "--max_samples", 64, "--prompt_max_len", 512, "--generate_max_len", 24,
        "--reward_fn", f"{reward}:share_of_digits",
        "--advantage_estimator", "group_norm", "--init_kl_coef", 0,
        "--rollout_batch_size", 4, "--n_samples_per_prompt", 4,
        "--train_batch_size", 8, "--micro_train_batch_size", 4, "--micro_rollout_batch_size", 8,
        "--actor_learning_rate", 1e-3, "--lr_warmup_ratio", 0,
        "--output_dir", run, "--save_steps", 1,
    )  # fmt: skip
    run_lightrft(*command, "--max_steps", 3)
    steps, rows = metrics_of(run)
    assert len(steps) == 3
    assert [row["weights_version"] for row in steps] == [1, 2, 3]
    assert all(row["reward_std"] > 0 and row["grad_norm"] > 0 for row in steps)
    assert len({row["engine_hash"] for row in steps}) == 3
    assert any("eval/reward" in row for row in rows)
    assert steps[-1]["engine_hash"] == saved_model_hash(run / "model")

    run_lightrft(*command, "--max_steps", 4, "--load_checkpoint")
    resumed, _ = metrics_of(run)
    assert len(resumed) == 4
    assert resumed[:3] == steps
    assert resumed[3]["engine_hash"] == saved_model_hash(run / "model") != steps[-1]["engine_hash"]


def saved_model_hash(directory):
    """The model hash of a checkpoint on disk, from its own bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrft.kernels import hash_tensor
    from lightrft.strategy.weight_sync.verification import model_hash

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    hashes = {name: hash_tensor(p.detach()) for name, p in model.named_parameters()}
    return model_hash(hashes)
