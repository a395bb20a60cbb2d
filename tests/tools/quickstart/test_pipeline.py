"""The quick start of all stages: its refusals, its pairs, its table, and the whole."""

import json
from pathlib import Path

import pytest

from lightrft.cli.main import main
from lightrft.tools.quickstart.pipeline import Outcome, pairs, table

pytestmark = pytest.mark.shard("quickstart")


FLAGS = [["--vision"], ["--environment"], ["--algorithm", "ppo"], ["--strategy", "deepspeed"]]


@pytest.mark.parametrize("flags", FLAGS)
def test_other_tasks_and_algorithms_are_refused_in_one_line(tmp_path, capsys, flags):
    folder = tmp_path / "run"
    assert main(["quickstart", "--pipeline", "--output_dir", str(folder), *flags]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "--pipeline" in lines[0]
    assert flags[0] in lines[0]
    assert not folder.exists()


def sample(prompt, response, accuracy, *, kind="sampled", is_cut=False):
    return {
        "pass": kind,
        "prompt": prompt,
        "response": response,
        "accuracy": accuracy,
        "truncated": is_cut,
    }


def test_pairs_hold_whole_right_and_wrong_samples_of_one_prompt_none_twice():
    samples = [
        sample("p", "greedy", 1.0, kind="greedy"),
        sample("p", "right", 1.0),
        sample("p", "right", 1.0),
        sample("p", "", 0.0),
        sample("p", "cut", 0.0, is_cut=True),
        sample("p", "wrong", 0.0),
        sample("p", "another", 0.0),
        sample("q", "alone", 1.0),
    ]
    assert pairs(samples) == [{"prompt": "p", "chosen": "right", "rejected": "wrong"}]
    many = [sample("p", f"{kind}{i}", kind) for i in range(5) for kind in (0.0, 1.0)]
    assert [row["chosen"] for row in pairs(many)] == ["1.00", "1.01", "1.02", "1.03"]


def test_the_table_has_a_line_for_each_stage():
    outcomes = [Outcome("sft", 0.25, 12.34, Path("a/sft")), Outcome("dpo", 0.5, 1.0, Path("a/dpo"))]
    head, *lines, note = table(outcomes).splitlines()
    assert head.split() == ["stage", "held-out", "seconds", "folder"]
    assert [line.split() for line in lines] == [
        ["sft", "0.250", "12.3", "a/sft"],
        ["dpo", "0.500", "1.0", "a/dpo"],
    ]
    assert "reward" in note


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_preferences_correct_the_imitator_and_the_student_follows(tmp_path):
    folder = tmp_path / "run"
    assert main(["quickstart", "--pipeline", "--output_dir", str(folder)]) == 0
    stages = json.loads((folder / "summary.json").read_text())["stages"]
    accuracy = {name: stage["accuracy"] for name, stage in stages.items()}
    assert list(accuracy) == ["sft", "reward", "dpo", "grpo", "distill"]
    assert accuracy["sft"] < 0.45
    assert accuracy["reward"] > 0.75
    assert accuracy["dpo"] > accuracy["sft"] + 0.4
    assert accuracy["grpo"] > accuracy["sft"] + 0.15
    assert accuracy["distill"] > max(accuracy["dpo"], accuracy["grpo"]) - 0.1
