"""Steps on episodes that a real engine samples, in any layout, on one process or two."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightrft.models.presets import write_tiny_model
from lightrft.strategy.testing import run_multiprocess

pytestmark = pytest.mark.multiprocess

CASES = Path(__file__).parent.parent / "experience" / "environment_cases.py"
TEMPLATE = """\
{%- for x in tools or [] %}{{- '<|system|>' + x.function.name }}{%- endfor %}\
{%- for m in messages %}\
{%- if m.role == 'tool' %}{{- '<|user|><tool_response>' + m.content + '</tool_response>' }}\
{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- for k in m.tool_calls or [] %}\
{{- '<tool_call>' + (k.function | tojson) + '</tool_call>' }}{%- endfor %}\
{%- if m.role == 'assistant' %}{{- eos_token }}{%- endif %}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
REWARD = """
def score(responses):
    return [(sum(map(ord, text)) % 7) / 7 for text in responses]
"""


def train_each(rank, world_size, runs):
    """Random models write no calls and seldom end: here bytes below 90 do, and every turn calls."""
    import lightrft.experience.environments.rounds as rounds
    import lightrft.experience.sampling as sampling
    from lightrft.config import TrainConfig
    from lightrft.experience.environments.calls import ToolCall
    from lightrft.strategy.distributed.process_groups import start_process_group
    from lightrft.trainer.runs.assembly import run_training

    own = sampling.training_params
    sampling.training_params = lambda config: replace(own(config), stop_token_ids=tuple(range(90)))
    rounds.choose_parser = lambda *given: lambda text, is_ended: [ToolCall("count_up")]
    start_process_group(None)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def run(folder, world_size, variants):
    common = {
        "pretrain": str(folder / "model"), "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt", "reward_fn": (f"{folder / 'reward.py'}:score",), "bf16": False,
        "engine_type": "hf", "rollout_batch_size": 4, "n_samples_per_prompt": 4,
        "train_batch_size": 8, "generate_max_len": 12, "prompt_max_len": 64, "max_steps": 1,
        "advantage_estimator": "gae", "init_kl_coef": 0.05, "use_kl_loss": True,
        "entropy_coef": 0.01, "loss_agg_mode": "token-mean", "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3, "lr_warmup_ratio": 0.0, "max_norm": 0.5, "max_turns": 3,
        "environment": f"{CASES}:Counter", "chat_template": str(folder / "template.jinja"),
        "apply_chat_template": True, "environment_workers": 1, "save_trajectories": True,
        "max_observation_tokens": 32,
    }  # fmt: skip
    outputs = [folder / f"run_{world_size}_{i}" for i in range(len(variants))]
    runs = [
        {**common, **v, "output_dir": str(out)} for v, out in zip(variants, outputs, strict=True)
    ]
    ranks = run_multiprocess(train_each, world_size, timeout_seconds=400, args=(runs,))
    return list(zip(ranks[0], outputs, strict=True))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment_run")
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    rows = [json.dumps({"prompt": f"say {'aeiou'[i % 5] * (1 + 3 * (i % 4))}"}) for i in range(8)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    padded = {"fsdp": True, "micro_train_batch_size": 2}
    packed = {"fsdp": True, "packing_samples": True, "micro_batch_tokens": 150}
    return run(folder, 1, (padded, packed))


def assert_same_step(found, expected):
    for name, value in expected[0].items():
        if "second" in name or name.startswith("memory/") or name == "engine_hash":
            continue
        if "mfu" in name or "tflops" in name:
            continue
        tolerance = 1e-4 if "max" in name or "min" in name or "diff" in name else 2e-6
        assert found[0][name] == pytest.approx(value, rel=2e-4, abs=tolerance), name


@pytest.mark.timeout(600)
def test_a_step_on_episodes_does_not_depend_on_the_layout(alone):
    expected, packed = alone
    metrics, output = expected
    assert_same_step(packed, expected)
    assert 1.5 < metrics["episode/turns"] <= 3
    assert metrics["episode/calls"] > 0.5
    assert metrics["tool/count_up/error_share"] == 0
    assert metrics["reward/Counter"] > 0
    assert math.isfinite(metrics["grad_norm"])
    # What is written: the journal, conversations, and which tokens were sampled.
    events = lines(output / "journal" / "step-000001.rank-0.jsonl")
    assert [e["event"] for e in events].count("reset") == 16
    assert sum(e["event"] == "turn" for e in events) == round(16 * metrics["episode/turns"])
    by_sample = {e["sample_id"]: e for e in events if e["event"] == "end"}
    for entry in lines(output / "samples.jsonl"):
        answers = [c["answer"] for turn in entry["turns"] for c in turn["calls"]]
        assert answers == [str(i + 1) for i in range(len(answers))]
        assert by_sample[entry["sample_id"]]["reward"][1]["count"] == len(answers)
        assert entry["components"]["count"] == len(answers)
    several = 0
    for entry in lines(output / "trajectories.jsonl"):
        flags = [any(a <= i < b for a, b in entry["sampled_spans"])
                 for i in range(len(entry["token_ids"]))]  # fmt: skip
        several += len(entry["sampled_spans"]) > 1
        for name in ("logprobs", "rollout_logprobs", "advantages", "returns", "values"):
            assert all(x == 0 for x, f in zip(entry[name], flags, strict=True) if not f), name
        assert all(x < 0 for x, f in zip(entry["rollout_logprobs"], flags, strict=True) if f)
    assert several > 0


@pytest.mark.timeout(600)
def test_two_processes_give_the_step_of_one(folder, alone):
    sharing = {"fsdp": True, "sp_size": 2, "packing_samples": True, "micro_batch_tokens": 150}
    for found in run(folder, 2, ({"fsdp": True, "micro_train_batch_size": 2}, sharing)):
        assert_same_step(found, alone[0])
        assert len(lines(found[1] / "journal" / "step-000001.rank-1.jsonl")) > 16
