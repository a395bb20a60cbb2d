"""The examples raise what the pretrained model gets right of held-out tasks."""

from __future__ import annotations

import importlib.util
import json

import pytest

from lightrft.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(repository):
    return repository / "examples" / "smollm2"


def write_sums(example, folder) -> list[str]:
    """Options that name the data and the reward of the sums, wherever the run starts."""
    spec = importlib.util.spec_from_file_location("sums", example / "sums.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(folder)
    return [
        "--prompt_data",
        str(folder / "train.jsonl"),
        "--eval_data",
        str(folder / "eval.jsonl"),
        "--reward_fn",
        f"{example / 'sums.py'}:first_line",
    ]


@pytest.mark.timeout(3500)
@pytest.mark.parametrize(
    "config, seed, gain",
    [
        pytest.param(config, seed, gain, marks=pytest.mark.shard(f"smollm2_{shard}"))
        for config, shard, seed, gain in (
            ("sums", "sums", 0, 0.3),
            ("sums", "sums", 1, 0.3),
            ("sums_lora", "lora", 0, 0.3),
            ("sums_lora", "lora", 1, 0.3),
            ("chain_sum", "chain_sum", 0, 0.15),
        )
    ],
)
def test_held_out_answers_become_right(example, smollm2, tmp_path, config, seed, gain):
    run = tmp_path / "run"
    code = main(
        [
            "train",
            "--config",
            str(example / f"{config}.toml"),
            "--pretrain",
            str(smollm2),
            *(write_sums(example, tmp_path) if config != "chain_sum" else ()),
            "--seed",
            str(seed),
            "--output_dir",
            str(run),
        ]
    )
    assert code == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [step["eval/reward"] for step in steps if "eval/reward" in step]
    assert 0.05 <= held_out[0] <= 0.5
    assert held_out[-1] >= held_out[0] + gain
