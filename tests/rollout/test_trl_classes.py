"""Shapes of TRL's environments and their reward functions run unchanged."""

from pathlib import Path

import pytest
from tests.rollout.stages import Stage, answers_of, call

from lightrft.rewards.build import build_reward
from lightrft.rewards.types import RewardError
from lightrft.rollout.environments.pool import Host

FILE = Path(__file__).with_name("trl_environments.py")
REWARDS = ("format_reward", "state_reward", "board_reward")
# Of each shape its row, what the model says, what it is answered, and the rewards by function;
# the sum is the reward. All rows are of one step.
CASES = {
    "scored": (
        {"input": "Count."},
        [call("increment", step=2) + call("increment", step=1), call("decrement", step=1), "done"],
        ["2", "3", '{"error": "no tool \'decrement\': there are increment"}'],
        {"format_reward": 0.25, "Scored": 3.0},
    ),
    "ownsdata": ({}, [call("jump", step=9), "no"], ["9"], {"OwnsData": 0.0}),
    "echoes": (
        {"input": "Say it."},
        [call("echo", message="hello"), "no"],
        ["HELLO"],
        {"state_reward": 0.5},
    ),
    "board": (
        {"input": "Slide.", "size": 2},
        [call("slide", direction="left"), call("slide", direction="up"), "no"],
        ['{"error": "ValueError: Invalid direction \'left\'"}', "score=2"],
        {"board_reward": 2.5},
    ),
}


def play(tmp_path, names, rewards, **options):
    """The samples of a step whose prompts are of these shapes."""
    stage = Stage(
        tmp_path,
        lambda request_id: CASES[names[request_id // 2]][1],
        rows=[{"environment": name, **CASES[name][0]} for name in names],
        environment=f"{FILE}:SHAPES",
        prompt_max_len=3000,
        reward_fn=tuple(f"{FILE}:{name}" for name in rewards),
        **options,
    )
    with build_reward(stage.config.reward_fn, config=stage.config) as reward:
        reward.check_columns({"environment", "size"})
        return stage.collect(reward)


@pytest.mark.full
def test_shapes_are_played_and_paid_as_under_trl(tmp_path):
    samples = play(tmp_path, list(CASES), REWARDS)
    for number, item in enumerate(samples.scored):
        _, _, answers, paid = list(CASES.values())[number // 2]
        told = [text for turn in answers_of(item.rollout) for text in turn]
        assert told == answers
        found = {name: value for name, value in item.components.items() if value or name in paid}
        assert found == pytest.approx(paid)
        assert item.reward == pytest.approx(sum(paid.values()))
    prompts = [item.rollout.prompt.text for item in samples.scored]
    owned = 2 * list(CASES).index("ownsdata")
    assert "user\nReach " in prompts[owned]
    # Unlike under TRL, where each of them draws a task of its own.
    assert prompts[owned] == prompts[owned + 1]


@pytest.mark.full
def test_what_cannot_leave_its_process_is_named_in_one_line(tmp_path):
    with pytest.raises(RewardError) as refused:
        play(tmp_path, ["echoes"], ["client_reward"])
    line = "attribute 'env' of the environment Echoes cannot be read: TypeError: cannot pickle"
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_is_kept_where_no_function_reads_it(tmp_path, monkeypatch):
    asked = []
    ask = Host.ask
    monkeypatch.setattr(
        Host, "ask", lambda *given, **more: asked.append(given[1]) or ask(*given, **more)
    )
    play(tmp_path, ["scored"], ["format_reward"])
    assert set(asked) == {"reset", "call", "reward", "close"}
    play(tmp_path, ["echoes"], ["state_reward"])
    assert asked.count("keep") == 2


def test_rows_that_no_function_scores_are_an_error(tmp_path):
    with pytest.raises(RewardError, match="every function returned None for a response"):
        play(tmp_path, ["board"], ["state_reward"])


@pytest.mark.full
def test_an_episode_that_failed_keeps_nothing_and_is_masked_alone(tmp_path, monkeypatch):
    without_size = ({"input": "Slide."}, *CASES["board"][1:])
    monkeypatch.setitem(CASES, "board", without_size)
    names, functions = ["board", "echoes"], ["state_reward", "format_reward"]
    samples = play(tmp_path, names, functions, reward_failure="mask")
    assert [item.is_masked for item in samples.scored] == [True, True, False, False]
    assert [item.reward for item in samples.scored[2:]] == [0.5, 0.5]
