"""The example on two-digit sums raises what the pretrained model gets right."""

from __future__ import annotations

import importlib.util
import json

import pytest

from lightrft.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(repository):
    return repository / "examples" / "smollm2"


def load(example):
    spec = importlib.util.spec_from_file_location("sums", example / "sums.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(3500)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("config", ["sums", "sums_lora"])
def test_held_out_sums_are_learnt(example, smollm2, tmp_path, config, seed):
    load(example).write(tmp_path)
    run = tmp_path / "run"
    code = main([
        "train", "--config", str(example / f"{config}.toml"), "--pretrain", str(smollm2),
        "--prompt_data", str(tmp_path / "train.jsonl"), "--eval_data", str(tmp_path / "eval.jsonl"),
        "--reward_fn", f"{example / 'sums.py'}:first_line", "--seed", str(seed),
        "--output_dir", str(run),
    ])  # fmt: skip
    assert code == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [step["eval/reward"] for step in steps if "eval/reward" in step]
    assert 0.05 <= held_out[0] <= 0.5
    assert held_out[-1] >= held_out[0] + 0.3
