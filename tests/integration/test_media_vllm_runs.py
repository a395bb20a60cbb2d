"""Whole runs with the real vLLM on images: those that agree, and those that the gates end."""

import json

import pytest
from tests.trainer.vision_world import write_data

from lightrft.config import TrainConfig
from lightrft.models.vision.tiny import write_tiny_vision_model
from lightrft.trainer.runs.assembly import run_training
from lightrft.trainer.training.parity import ParityError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def run(preset, folder, **options):
    write_tiny_vision_model(folder / "model", preset, seed=1)
    data = write_data(folder)
    config = TrainConfig().replaced({
        "pretrain": str(folder / "model"), "prompt_data": str(data / "train.jsonl"),
        "reward_fn": (f"{data / 'reward.py'}:reward",), "apply_chat_template": True,
        "prompt_max_len": 200, "generate_max_len": 6, "rollout_batch_size": 4,
        "n_samples_per_prompt": 4, "train_batch_size": 16, "micro_train_batch_size": 8,
        "max_steps": 3, "actor_learning_rate": 1e-3, "engine_type": "vllm",
        "output_dir": str(folder / "out"), **options,
    })  # fmt: skip
    return run_training(config)


def test_a_run_stays_in_step_with_vllm(tmp_path):
    """With images smaller than the saved processor's: the sizes reach vLLM."""
    summary = run("tiny-qwen2.5-vl", tmp_path, max_pixels=56 * 84)
    assert summary.verdict.startswith("learned")
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert all(step["logprob_diff_mean"] < 1e-5 for step in steps)


def test_a_family_that_vllm_computes_otherwise_is_ended_by_the_gate(tmp_path):
    """vLLM attends causally within an image of Gemma 3 on a CPU."""
    with pytest.raises(ParityError, match=r"outputs differ first in model\.language_model\.layers"):
        run("tiny-gemma3", tmp_path)


def test_a_prompt_that_vllm_reads_otherwise_ends_the_run(tmp_path):
    """Two images of Llava-OneVision: vLLM cuts tiles where transformers takes whole images."""
    with pytest.raises(ValueError, match=r"vLLM reads a prompt with 2 images .* differ first at"):
        run("tiny-llava-onevision", tmp_path)
