"""The quick start: its task, its teacher, its warm start, and the whole command."""

import json
import os
import random
import re
import subprocess
import sys
from itertools import islice

import pytest
import torch
from tests.tools.quickstart.dice import Dice

from lightrft.cli.main import main
from lightrft.reporting.metric_table import metric_row
from lightrft.tools.quickstart.boxed_sum import score
from lightrft.tools.quickstart.quickstart_command import (
    ESTIMATORS,
    STRATEGIES,
    TASKS,
    LiveReward,
    Recipe,
    build_parser,
    training_config,
)
from lightrft.tools.quickstart.task import (
    ADDITION,
    HELD_OUT_SHARE,
    Addition,
    demonstrate,
    draw_additions,
    is_held_out,
    load_example,
    write_exercises,
)

pytestmark = pytest.mark.shard("quickstart")


def test_careful_and_careless_demonstrations():
    addition = Addition(457, 386)
    assert addition.question == "What is 457+386?"
    assert addition.answer == "843"
    careful = demonstrate(addition, Dice(0.99))
    assert careful == r"<think>ones 7+6+0=13 tens 5+8+1=14 hundreds 4+3+1=8</think>\boxed{843}"
    careless = demonstrate(addition, Dice(0.0))
    assert careless == r"<think>ones 7+6+0=13 tens 5+8+0=13 hundreds 4+3+0=7</think>\boxed{733}"


def test_training_and_held_out_sums_never_meet(tmp_path):
    write_exercises(tmp_path / "train", ADDITION, 500, seed=0, held_out=False)
    write_exercises(tmp_path / "eval", ADDITION, 500, seed=0, held_out=True)
    rows = [
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train", "eval")
    ]
    assert [len(part) for part in rows] == [500, 500]
    prompts = [{row["prompt"] for row in part} for part in rows]
    assert prompts[0].isdisjoint(prompts[1])
    for row in rows[0] + rows[1]:
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        assert str(first + second) == row["answer"]


def test_the_split_is_one_in_ten_and_the_same_in_every_process():
    pairs = [(x, y) for x in range(100, 300) for y in range(100, 300)]
    held_out = [is_held_out(x, y) for x, y in pairs]
    assert abs(sum(held_out) / len(pairs) - 1 / HELD_OUT_SHARE) < 0.01
    code = (
        "from lightrft.tools.quickstart.task import is_held_out; "
        "print([y for y in range(100, 200) if is_held_out(100, y)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [y for y in range(100, 200) if is_held_out(100, y)]


@pytest.mark.parametrize(
    "response, reward",
    [
        (r"<think></think>\boxed{843}", 1.0),
        (r"\boxed{844}", 0.0),
        (r"\boxed{843} ", 0.0),
        (r"\boxed{843}.", 0.0),
        (r"\boxed{12}\boxed{843}", 1.0),
        (r"843", 0.0),
        (r"\boxed{}", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_wants_the_right_box_at_the_very_end(response, reward):
    assert score(["q"], [response], ["843"], further=[1]) == [reward]


def test_only_the_response_is_imitated():
    from lightrft.tools.quickstart.warm_start import IGNORED, build_tokenizer, demonstration_batch

    tokenizer = build_tokenizer(ADDITION)
    additions = list(islice(draw_additions(random.Random(2), False), 16))
    token_ids, targets = demonstration_batch(tokenizer, additions, random.Random(1))
    assert token_ids.shape == targets.shape
    for row, target in zip(token_ids, targets, strict=True):
        trained = target != IGNORED
        assert torch.equal(row[trained], target[trained])
        prompt, response = tokenizer.decode(row).split("<|assistant|>")
        assert re.fullmatch(r"<\|user\|>What is \d+\+\d+\?", prompt)
        shown = tokenizer.decode(target[trained])
        assert response.removeprefix(shown).replace("<|pad|>", "") == ""
        assert re.fullmatch(r"<think>.*</think>\\boxed\{\d+\}<\|end\|>", shown)


RECIPES = [Recipe(algorithm=a, strategy=s) for a in ESTIMATORS for s in STRATEGIES]
EXAMPLES = [load_example(place) for place in TASKS.values()]


@pytest.mark.parametrize(
    "recipe", [*RECIPES, *(Recipe(task=task, **task.numbers) for task in EXAMPLES)]
)
def test_every_recipe_is_a_legal_configuration_without_unused_options(tmp_path, recipe):
    config = training_config(recipe, tmp_path)
    config.check_world_size(1)
    assert config.unused_options() == []
    assert config.rollout_batch_size * recipe.num_steps == recipe.num_prompts


@pytest.mark.parametrize("name", ["num_steps", "num_warm_start_steps", "num_eval_prompts"])
def test_the_help_says_the_numbers_of_every_task(name):
    usual = getattr(Recipe(), name)
    numbers = {flag: load_example(place).numbers.get(name, usual) for flag, place in TASKS.items()}
    others = "".join(f", with --{flag} {n}" for flag, n in numbers.items() if n != usual)
    assert f"Default: {usual}{others}." in " ".join(build_parser().format_help().split())


def test_the_display_shows_reward_and_accuracy(tmp_path):
    with (tmp_path / "out").open("w") as stream:
        live = LiveReward(stream, num_steps=60)
        live.log(0, {"eval/reward": 0.32})
        live.log(7, {"reward": 0.5})
        live.log(10, {"reward": 1.0, "eval/reward": 0.99, "episode/calls": 1.25})
    first, second, third = (tmp_path / "out").read_text().splitlines()
    assert first.split() == ["step", "0/60", "held-out", "0.320"]
    assert "reward 0.500" in second
    assert second.endswith("0:00 left")
    assert third.split()[2:] == [
        "reward",
        "1.000",
        "held-out",
        "0.990",
        "0:00",
        "left",
        "calls",
        "1.25",
    ]
    assert first.index("held-out") == third.index("held-out")
    assert len(third) <= 80


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_short_quick_start_leaves_a_complete_run(tmp_path, capsys, algorithm):
    folder = tmp_path / "run"
    argv = ["--output_dir", str(folder), "--algorithm", algorithm]
    argv += ["--steps", "2", "--warm_start_steps", "3", "--eval_prompts", "8"]
    assert main(["quickstart", *argv]) == 0
    shown = capsys.readouterr().out
    assert "step 2/2  reward" in shown
    assert "StrategyINFO" not in shown
    assert "CPU threads: 1 (" in shown
    for line in (*ADDITION.flaw, *ADDITION.outlook):
        assert f"  {line}\n" in shown
    steps = [line for line in shown.splitlines() if "/2  reward" in line]
    assert max(map(len, (*steps, *ADDITION.flaw, *ADDITION.outlook))) <= 78
    summary = json.loads((folder / "summary.json").read_text())
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert set(summary["seconds"]) == {"warm_start", "reinforcement", "total"}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps] == [0, 1, 2]
    assert [entry["weights_version"] for entry in steps[1:]] == [1, 2]
    unknown = {name for entry in steps for name in entry if metric_row(name) is None}
    assert unknown == {"step"}
    assert f"open {folder / 'report.html'} in a browser" in shown
    assert "lightrft train --config" in shown
    page = (folder / "report.html").read_text()
    assert ">finished<" in page
    assert 'id="token-view"' in page
    assert "weights version 2 after step 2" in page
    for name in ("config.toml", "run.log", "reward.py", "checkpoints", "run.json"):
        assert (folder / name).exists(), name


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed, algorithm", enumerate(ESTIMATORS, 1))
def test_reinforcement_finds_the_carry(tmp_path, seed, algorithm):
    """With other seeds than the command of the README, which is GRPO under FSDP."""
    argv = ["--algorithm", algorithm, "--strategy", STRATEGIES[seed % len(STRATEGIES)]]
    argv += ["--seed", str(seed), "--output_dir", str(tmp_path / "run")]
    assert main(["quickstart", *argv]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] >= max(0.95, summary["accuracy_before"] + 0.6)
