"""A step on environments in the shapes of TRL's and SkyRL-Gym's, sampled by a real engine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess

from lightrft.config import TrainConfig
from lightrft.rollout.sampler import training_params
from lightrft.tools.model_presets import write_tiny_model

pytestmark = pytest.mark.multiprocess

SHAPES = Path(__file__).parent.parent / "rollout"
TEMPLATE = """\
{%- for x in tools or [] %}{{- '<|system|>' + x.function.name }}{%- endfor %}\
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}\
{%- for k in m.tool_calls or [] %}{{- (k.function | tojson) }}{%- endfor %}\
{%- if m.role == 'assistant' %}{{- eos_token }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
VALUES = {"integer": 1, "string": "up"}
LETTERS = "def letters(responses): return [(sum(map(ord, text)) % 7) / 7 for text in responses]"
REWARDS = ("format_reward", "state_reward", "fall_reward", "board_reward", "left_reward")


def with_stops(config):
    """Random models seldom end: here bytes below 90 do."""
    return replace(training_params(config), stop_token_ids=tuple(range(90)))


def calling(parser, tokenizer, schemas):
    """Random models write no calls either: here every turn calls the first tool."""
    from lightrft.rollout.environments.calls import ToolCall

    function = schemas[0]["function"]
    parameters = function["parameters"]["properties"]
    arguments = {name: VALUES[schema["type"]] for name, schema in parameters.items()}
    return lambda text, *others: [ToolCall(function["name"], arguments)]


def train_each(rank, world_size, runs):
    import lightrft.rollout.environments.specs as specs
    import lightrft.rollout.sampler as sampling
    import lightrft.stages.policy.inputs as inputs
    from lightrft.reporting.trajectories import SampleLog
    from lightrft.run.assembly import run_training
    from lightrft.strategy.distributed.process_groups import start_process_group

    sampling.training_params = with_stops
    specs.choose_parser = calling
    inputs.SampleLog = partial(SampleLog, num_samples=16)
    start_process_group(None)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def runs_in(tmp_path):
    """Options of a run on TRL's shapes, and of one on SkyRL-Gym's."""
    write_tiny_model(tmp_path / "model", "tiny-qwen3", seed=1)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "reward.py").write_text(LETTERS)
    letters = f"{tmp_path / 'reward.py'}:letters"
    names = ("increments", "scored", "ownsdata", "readsrow", "echoes", "falls", "several", "board")
    trl = [{"environment": name, "input": "say"} for name in names]
    trl[2].pop("input")
    trl[3]["target"] = 4
    skyrl = [{"input": f"say {i}", "reward_spec": {"ground_truth": "4"}} for i in range(8)]
    for name, rows in (("trl", trl), ("skyrl", skyrl)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "pretrain": str(tmp_path / "model"),
        "bf16": False,
        "engine_type": "hf",
        "fsdp": True,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 2,
        "train_batch_size": 16,
        "micro_train_batch_size": 8,
        "generate_max_len": 12,
        "prompt_max_len": 96,
        "max_steps": 1,
        "actor_learning_rate": 1e-3,
        "max_turns": 3,
        "chat_template": str(tmp_path / "template.jinja"),
        "apply_chat_template": True,
        "environment_workers": 1,
        "max_observation_tokens": 64,
        "tool_parser": "hermes",
    }
    return [
        {
            **common,
            "environment": f"{SHAPES / 'trl_environments.py'}:SHAPES",
            "reward_fn": (
                letters,
                *(f"{SHAPES / 'trl_environments.py'}:{name}" for name in REWARDS),
            ),
            "prompt_data": str(tmp_path / "trl.jsonl"),
            "output_dir": str(tmp_path / "of_trl"),
        },
        {
            **common,
            "environment": f"skyrl_gym:{SHAPES / 'skyrl_environments.py'}:Tries",
            "reward_fn": (letters,),
            "prompt_data": str(tmp_path / "skyrl.jsonl"),
            "output_dir": str(tmp_path / "of_skyrl"),
        },
    ]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_step_on_the_classes_of_trl_and_of_skyrl_gym(tmp_path):
    runs, seen = runs_in(tmp_path), set()
    ((of_trl, of_skyrl),) = run_multiprocess(train_each, 1, timeout_seconds=400, args=(runs,))
    for metrics in (of_trl, of_skyrl):
        assert math.isfinite(metrics["grad_norm"])
        assert metrics["grad_norm"] > 0
        assert metrics["episode/turns"] > 1.2
    samples = [json.loads(line) for line in (tmp_path / "of_trl/samples.jsonl").open()]
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
