"""A step on environments in the shapes of TRL's and SkyRL-Gym's, sampled by a real engine."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.runs import (
    TEMPLATE,
    calling,
    lines,
    rollout_options,
    tiny_models,
    train_each,
    write,
    write_inputs,
)

import lightrft.stages.policy.inputs as inputs
from lightrft.reporting.trajectories import SampleLog
from lightrft.rollout.environments.calls import ToolCall

pytestmark = pytest.mark.multiprocess

SHAPES = Path(__file__).parent.parent / "rollout"
VALUES = {"integer": 1, "string": "up"}
LETTERS = "def letters(responses): return [(sum(map(ord, text)) % 7) / 7 for text in responses]"
REWARDS = ("format_reward", "state_reward", "fall_reward", "board_reward", "left_reward")


def first_tool(parser, tokenizer, schemas):
    """Random models write no calls either: here every turn calls the first tool."""
    function = schemas[0]["function"]
    parameters = function["parameters"]["properties"]
    arguments = {name: VALUES[schema["type"]] for name, schema in parameters.items()}
    return lambda text, *others: [ToolCall(function["name"], arguments)]


def train_and_show(rank, world_size, runs):
    """Metrics of each run, which writes down all of its samples."""
    inputs.SampleLog = partial(SampleLog, num_samples=16)
    with calling(choose=first_tool):
        return [each["last_metrics"] for each in train_each(rank, world_size, runs)]


def runs_in(tmp_path):
    """Options of a run on TRL's shapes, and of one on SkyRL-Gym's."""
    files = {"template.jinja": TEMPLATE}
    write_inputs(tiny_models(tmp_path, "model"), reward=LETTERS, files=files)
    names = ("increments", "scored", "ownsdata", "readsrow", "echoes", "falls", "several", "board")
    trl = [{"environment": name, "input": "say"} for name in names]
    trl[2].pop("input")
    trl[3]["target"] = 4
    skyrl = [{"input": f"say {i}", "reward_spec": {"ground_truth": "4"}} for i in range(8)]
    common = {
        "input_key": "input",
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 2,
        "train_batch_size": 16,
        "micro_train_batch_size": 8,
        "generate_max_len": 12,
        "prompt_max_len": 96,
        "max_steps": 1,
        "max_turns": 3,
        "chat_template": str(tmp_path / "template.jinja"),
        "apply_chat_template": True,
        "environment_workers": 1,
        "max_observation_tokens": 64,
        "tool_parser": "hermes",
    }
    classes = SHAPES / "trl_environments.py"
    letters = f"{tmp_path / 'reward.py'}:letters"
    rewards = (letters, *(f"{classes}:{name}" for name in REWARDS))
    return [
        rollout_options(tmp_path, f"of_{name}", prompt_data=data, **common, **own)
        for name, data, own in (
            (
                "trl",
                write(tmp_path / "trl.jsonl", trl),
                {"environment": f"{classes}:SHAPES", "reward_fn": rewards},
            ),
            (
                "skyrl",
                write(tmp_path / "skyrl.jsonl", skyrl),
                {
                    "environment": f"skyrl_gym:{SHAPES / 'skyrl_environments.py'}:Tries",
                    "reward_fn": (letters,),
                },
            ),
        )
    ]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_step_on_the_classes_of_trl_and_of_skyrl_gym(tmp_path):
    runs, seen = runs_in(tmp_path), set()
    ((of_trl, of_skyrl),) = run_multiprocess(train_and_show, 1, timeout_seconds=400, args=(runs,))
    for metrics in (of_trl, of_skyrl):
        assert math.isfinite(metrics["grad_norm"])
        assert metrics["grad_norm"] > 0
        assert metrics["episode/turns"] > 1.2
    samples = lines(tmp_path / "of_trl/samples.jsonl")
    assert len(samples) == 16
    for sample in samples:
        calls = [call for turn in sample["turns"] for call in turn["calls"]]
        num_ok = sum(call["outcome"] == "ok" for call in calls)
        paid = sample["components"]
        name = calls[0]["name"] if calls else None
        seen.add(name)
        if name == "increment" and "Scored" in paid:
            assert paid["Scored"] == num_ok
        if name == "slide":
            assert paid["board_reward"] == 2 * num_ok + 0.5
        if name == "echo":
            assert paid["state_reward"] == pytest.approx(0.2)
        if name == "take":
            assert paid["left_reward"] == pytest.approx(1 / (5 - num_ok))
    assert seen >= {"increment", "slide", "echo", "take"}
