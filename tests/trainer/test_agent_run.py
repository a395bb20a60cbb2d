"""Steps on the calls of agents that a real engine answers, on one process or two, killed or not."""

import tempfile
from pathlib import Path

import pytest
from tests.runs import (
    assert_same,
    last_metrics,
    lines,
    rollout_options,
    tiny_models,
    with_stops,
    write,
)

from lightrft.records.table import BRANCH_STEP
from lightrft.reporting.rollouts import read_rollout
from lightrft.tools.replay import run_replay as replay

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

AGENT = Path(__file__).with_name("agent_of_run.py")
PROGRAM = Path(__file__).parent.parent / "tools/agents/program_of_agent.py"


def options_of(folder, output, **changes):
    common = {
        "reward_fn": (),
        "generate_max_len": 10,
        "prompt_max_len": 64,
        "max_steps": 1,
        "loss_agg_mode": "seq-mean-token-mean",
        "agent": f"{AGENT}:run",
        "apply_chat_template": True,
        "environment_workers": 1,
        "save_rollouts": True,
        "max_observation_tokens": 64,
    }
    return rollout_options(folder, output, **common | changes)


def run(folder, world_size, variants):
    """Metrics and folder of each run."""
    parent = Path(tempfile.mkdtemp(prefix="runs_", dir=folder))
    outputs = [parent / str(number) for number in range(len(variants))]
    runs = [
        options_of(folder, output, **changes)
        for output, changes in zip(outputs, variants, strict=True)
    ]
    metrics = last_metrics(world_size, runs, timeout_seconds=400, calls=())
    return list(zip(metrics, outputs, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_models(tmp_path_factory.mktemp("agent_run"), "model")
    rows = [{"prompt": f"say {'aeiou'[i % 5] * (1 + 3 * (i % 4))}"} for i in range(8)]
    write(folder / "train.jsonl", rows)
    write(folder / "turns.jsonl", [{**row, "turns": 1 + i % 3} for i, row in enumerate(rows)])
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
    rows = (read_rollout(line, "a line") for line in (output / "rollouts.jsonl").open("rb"))
    return {each.sample_id: each for each in rows}


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


def test_branches_are_written_down_below_what_they_leave(alone):
    shown = lines(alone[0][1] / "samples.jsonl")
    assert [line["sample_id"] for line in shown] == list(range(8))
    by_kind = {int(line["components"]["kind"]): line["branches"] for line in shown}
    # The end is asked for after the first turn, or after a rewritten one.
    places = {kind: [(b["of"], b["after"]) for b in found] for kind, found in by_kind.items()}
    assert places == {0: [(0, 1)], 1: [(0, 2), (0, 2), (0, 1)], 2: [(0, 2), (0, 2), (0, 0)]}


def test_a_step_does_not_depend_on_the_layout(alone):
    assert_same(alone[0][0], alone[1][0], rel=2e-4, small=2e-6)


def test_the_denominator_is_what_was_asked_for(alone):
    by_episode, by_branch = alone[0][0], alone[2][0]
    assert by_episode["policy_loss"] != pytest.approx(by_branch["policy_loss"], rel=1e-3)
    assert by_episode["reward"] == by_branch["reward"]


def test_two_ranks_train_the_same_ids(folder, alone):
    of_functions, of_programs = run(folder, 2, ({}, programs(folder)))
    assert of_programs[0]["agent/calls"] > 1
    for (metrics, output), by_itself in ((of_functions, alone[0]), (of_programs, alone[3])):
        assert_same(by_itself[0], metrics, rel=2e-4, small=2e-6)
        found, expected = samples(output), samples(by_itself[1])
        assert found.keys() == expected.keys()
        for sample_id, row in expected.items():
            for name in ("prompt_ids", "response_ids", "sampled_spans", "reward"):
                assert getattr(found[sample_id], name) == getattr(row, name)


def test_a_step_is_sampled_again_from_its_journal(alone, monkeypatch):
    monkeypatch.setattr(replay, "training_params", with_stops)
    step, found = replay.replay_run(alone[0][1], None)
    assert step == 1
    assert not found.differences
    assert found.num_turns > 16 * 4
