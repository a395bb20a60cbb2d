"""SmolLM2 through vLLM gives its tokens the logprobs that the trainer gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.shard("smollm2_vllm")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["--no_bf16", "--bf16"])
def test_two_steps_pass_the_parity_gate(precision, smollm2, tmp_path):
    """The gate ends a run (code 8) whose logprobs differ by more than rounding explains."""
    rows = [{"input": f"What is {a} + {b}?", "label": str(a + b)} for a in (3, 14) for b in (5, 26)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(
        "def digits(responses):\n    return [sum(c.isdigit() for c in r) / 32 for r in responses]\n"
    )
    run = tmp_path / "run"
    command = [
        "train",
        "--fsdp",
        precision,
        "--engine_type",
        "vllm",
        "--pretrain",
        smollm2,
        "--prompt_data",
        tmp_path / "prompts.jsonl",
        "--apply_chat_template",
        "--reward_fn",
        f"{tmp_path / 'reward.py'}:digits",
        "--init_kl_coef",
        0,
        "--prompt_max_len",
        96,
        "--generate_max_len",
        32,
        "--rollout_batch_size",
        2,
        "--n_samples_per_prompt",
        4,
        "--train_batch_size",
        8,
        "--micro_train_batch_size",
        4,
        "--micro_rollout_batch_size",
        4,
        "--actor_learning_rate",
        1e-5,
        "--lr_warmup_ratio",
        0,
        "--parity_check_steps",
        1,
        "--max_steps",
        2,
        "--num_episodes",
        2,
        "--verbose",
        "--output_dir",
        run,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lightrft.cli.main", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert done.stdout.count("parity: engine and trainer logprobs of ") == 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["weights_version"] for row in steps] == [1, 2]
    assert all(row["logprob_pearson"] > 0.999 for row in steps)
