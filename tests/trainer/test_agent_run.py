"""Steps on the calls of agents that a real engine answers, on one process or two, killed or not."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess

from lightrft.config import TrainConfig
from lightrft.records.table import BRANCH_STEP
from lightrft.reporting.rollouts import read_rollout
from lightrft.rollout.sampler import training_params
from lightrft.tools.model_presets import write_tiny_model
from lightrft.tools.replay import run_replay as replay

pytestmark = [pytest.mark.multiprocess, pytest.mark.full]

AGENT = Path(__file__).with_name("agent_of_run.py")
PROGRAM = Path(__file__).parent.parent / "tools" / "agents" / "program_of_agent.py"


def with_stops(config):
    """Random models seldom end: here bytes below 90 do."""
    return replace(training_params(config), stop_token_ids=tuple(range(90)))


def train_each(rank, world_size, runs):
    import lightrft.rollout.sampler as sampling
    from lightrft.run.assembly import run_training
    from lightrft.strategy.distributed.process_groups import start_process_group

    sampling.training_params = with_stops
    os.environ["KILL_PID"] = str(os.getpid())
    start_process_group(None)
    return [asdict(run_training(TrainConfig(**values)))["last_metrics"] for values in runs]


def run(folder, world_size, variants):
    common = {
        "pretrain": str(folder / "model"),
        "prompt_data": str(folder / "train.jsonl"),
        "input_key": "prompt",
        "bf16": False,
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "generate_max_len": 10,
        "prompt_max_len": 64,
        "max_steps": 1,
        "fsdp": True,
        "micro_train_batch_size": 2,
        "loss_agg_mode": "seq-mean-token-mean",
        "actor_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0,
        "agent": f"{AGENT}:run",
        "apply_chat_template": True,
        "environment_workers": 1,
        "save_rollouts": True,
        "max_observation_tokens": 64,
    }
    parent = Path(tempfile.mkdtemp(prefix="runs_", dir=folder))
    outputs = [parent / str(i) for i in range(len(variants))]
    runs = [
        {"output_dir": str(out), **common, **v} for v, out in zip(variants, outputs, strict=True)
    ]
    ranks = run_multiprocess(train_each, world_size, timeout_seconds=400, args=(runs,))
    return list(zip(ranks[0], [Path(r["output_dir"]) for r in runs], strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent_run")
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    rows = [json.dumps({"prompt": f"say {'aeiou'[i % 5] * (1 + 3 * (i % 4))}"}) for i in range(8)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({**json.loads(row), "turns": 1 + i % 3}) for i, row in enumerate(rows)]
    (folder / "turns.jsonl").write_text("\n".join(rows))
    return folder


def programs(folder):
    command = f"python3 {PROGRAM} {{base_url}} {{row}}"
    data = str(folder / "turns.jsonl")
    return {"agent": None, "agent_command": command, "prompt_data": data}


@pytest.fixture(scope="module")
def alone(folder):
    padded = {}
    packed = {"packing_samples": True, "micro_batch_tokens": 400}
    branches = {"agent_denominator": "branch"}
    return run(folder, 1, (padded, packed, branches, programs(folder)))


def samples(output):
    lines = (output / "rollouts.jsonl").read_bytes().splitlines()
    return {each.sample_id: each for each in (read_rollout(line, "a line") for line in lines)}


def same(found, expected, *, but=()):
    for name, value in expected.items():
        if "second" in name or name.startswith("memory/") or name in ("engine_hash", *but):
            continue
        if "mfu" in name or "tflops" in name:
            continue
        tolerance = 1e-4 if "max" in name or "min" in name or "diff" in name else 2e-6
        assert found[name] == pytest.approx(value, rel=2e-4, abs=tolerance), name


@pytest.mark.timeout(600)
def test_branches_are_rows_that_share_the_reward_of_their_episode(alone):
    metrics, output = alone[0]
    rows = samples(output)
    assert [i for i in sorted(rows) if i < BRANCH_STEP] == list(range(16))
    assert metrics["agent/branches"] == len(rows) / 16
    assert metrics["agent/branches"] > 2
    assert metrics["agent/lost_calls"] == 0
    for sample_id, row in rows.items():
        assert row.reward == rows[sample_id % BRANCH_STEP].reward
        # A branch is trained where it was sampled, and nowhere else.
        assert sum(stop - start for start, stop in row.sampled_spans) > 0
    firsts = [rows[i].reward for i in range(16)]
    assert metrics["reward"] == pytest.approx(sum(firsts) / 16)


@pytest.mark.timeout(600)
def test_branches_are_written_down_below_what_they_leave(alone):
    lines = [json.loads(line) for line in (alone[0][1] / "samples.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == list(range(8))
    by_kind = {int(line["components"]["kind"]): line["branches"] for line in lines}
    # The end is asked for after the first turn, or after a rewritten one.
    places = {kind: [(b["of"], b["after"]) for b in found] for kind, found in by_kind.items()}
    assert places == {0: [(0, 1)], 1: [(0, 2), (0, 2), (0, 1)], 2: [(0, 2), (0, 2), (0, 0)]}


@pytest.mark.timeout(600)
def test_a_step_does_not_depend_on_the_layout(alone):
    same(alone[1][0], alone[0][0])


@pytest.mark.timeout(600)
def test_the_denominator_is_what_was_asked_for(alone):
    by_episode, by_branch = alone[0][0], alone[2][0]
    assert by_episode["policy_loss"] != pytest.approx(by_branch["policy_loss"], rel=1e-3)
    assert by_episode["reward"] == by_branch["reward"]


@pytest.mark.timeout(600)
def test_two_ranks_train_the_same_ids(folder, alone):
    of_functions, of_programs = run(folder, 2, ({}, programs(folder)))
    assert of_programs[0]["agent/calls"] > 1
    for (metrics, output), by_itself in ((of_functions, alone[0]), (of_programs, alone[3])):
        same(metrics, by_itself[0])
        found, expected = samples(output), samples(by_itself[1])
        assert found.keys() == expected.keys()
        for sample_id, row in expected.items():
            for name in ("prompt_ids", "response_ids", "sampled_spans", "reward"):
                assert getattr(found[sample_id], name) == getattr(row, name)


@pytest.mark.timeout(600)
def test_a_step_is_sampled_again_from_its_journal(alone, monkeypatch):
    monkeypatch.setattr(replay, "training_params", with_stops)
    step, found = replay.replay_run(alone[0][1], None)
    assert step == 1
    assert not found.differences
    assert found.num_turns > 16 * 4


@pytest.mark.slow
@pytest.mark.shard("episode_kills")
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_inside_episodes_ends_equal(folder, alone, tmp_path):
    del alone
    ((_, whole),) = run(folder, 1, ({"max_steps": 2},))
    output, mark = tmp_path / "killed", tmp_path / "mark"
    variant = {"max_steps": 2, "output_dir": str(output)}
    mark.touch()
    os.environ["KILL_MARK"] = str(mark)
    with pytest.raises(BaseException):  # noqa: B017 - however a killed process is told
        run(folder, 1, (variant,))
    del os.environ["KILL_MARK"]
    assert not mark.exists()
    ((_, _),) = run(folder, 1, (variant,))
    found, expected = ((o / "model" / "model.safetensors").read_bytes() for o in (output, whole))
    assert found == expected
