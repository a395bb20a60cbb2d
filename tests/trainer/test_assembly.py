"""Whole runs: the real strategy, the embedded engine, files on disk."""

import json
import re

import pytest
from tests.runs import lines, rollout_options, say_rows, steps, train, write, write_inputs

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError
from lightrft.stages.policy.inputs import read_inputs
from lightrft.strategy.config import ConfigError

REWARD = """
from pathlib import Path

FUSE = Path(__file__).with_name("fuse")


def score(prompts, responses, labels, **columns):
    assert len(columns["kind"]) == len(labels) == len(prompts)
    if FUSE.exists():
        left = int(FUSE.read_text())
        assert left > 0, "the fuse is blown"
        FUSE.write_text(str(left - 1))
    return [sum(ord(c) % 2 for c in r) / max(len(r), 1) for r in responses]
"""


@pytest.fixture
def options(tmp_path, tiny_model):
    """Options of a run of this name."""
    rows = say_rows(12, answer=lambda number: "aeiou"[number % 5], kind=lambda number: number)
    write_inputs(tmp_path, rows, reward=REWARD)
    common = {
        "pretrain": tiny_model,
        "eval_data": write(tmp_path / "eval.jsonl", rows[:5]),
        "label_key": "answer",
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "loss_agg_mode": "token-mean",
        "max_steps": None,
    }
    return lambda name, **changes: rollout_options(tmp_path, name, **common | changes)


def test_layers_for_adapters_are_looked_for_before_weights_are_read(options):
    wrong = options("run", lora_rank=4, target_modules=("foo",))
    with pytest.raises(ConfigError, match=r"no linear layer is called foo; the model has .*q_proj"):
        read_inputs(TrainConfig(**wrong))


def test_fewer_prompts_than_a_step_takes_are_refused(options):
    few = options("run", rollout_batch_size=16, train_batch_size=16)
    with pytest.raises(ConfigError, match="12 usable prompts"):
        read_inputs(TrainConfig(**few))


@pytest.mark.full
def test_a_run_leaves_its_files_and_a_broken_one_is_continued(tmp_path, options, capsys):
    whole = train(options("run", save_steps=1, sample_steps=2))
    shown = capsys.readouterr().out
    rows = re.findall(r"sample of step (\d+): say \w+\n  reward (.*): .*\n  reward (.*):", shown)
    assert [row[0] for row in rows] == ["2"]
    assert float(rows[0][1]) >= float(rows[0][2])
    run = tmp_path / "run"
    assert whole.num_steps == json.loads((run / "summary.json").read_text())["num_steps"] == 3
    for name in ("config.toml", "samples.jsonl", "checkpoints", "model"):
        assert (run / name).exists(), name
    assert whole.first_eval["eval/num_prompts"] == 5
    assert whole.last_metrics["policy_loss"] != 0
    assert [step["step"] for step in lines(run / "metrics.jsonl")] == [0, 1, 2, 3]

    parts = options("parts", save_steps=1, heartbeat_seconds=0.002)
    # Checked at start, then a call a group: five of the evaluation, four of each of two steps.
    (tmp_path / "fuse").write_text("14")
    with pytest.raises(RewardError, match="fuse is blown"):
        train(parts)
    (tmp_path / "fuse").unlink()
    rest = train(parts | {"load_checkpoint": True})
    assert rest.num_resumed_steps == 2
    # Signs of life name the step under way, also before the first of this process.
    _, shown = capsys.readouterr().out.split("continuing ", 1)
    assert set(re.findall(r"still at step (\d+)/3", shown)) == {"3"}
    assert rest.first_eval["eval/reward"] == whole.first_eval["eval/reward"]
    assert rest.last_metrics["engine_hash"] == whole.last_metrics["engine_hash"]
    assert steps(tmp_path / "parts") == steps(run)
