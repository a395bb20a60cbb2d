"""Five shapes of SkyRL-Gym's environments run unchanged."""

import sqlite3
from pathlib import Path

import pytest
from tests.rollout.stages import Stage, answers_of

from lightrft.rewards.types import RewardError

FILE = Path(__file__).with_name("skyrl_environments.py")
# Of each shape its row, what the model says, what it is answered, the reward, and options.
CASES = {
    "Grade": ({}, ["so\n#### 4"], [[""]], 1.0, {}),
    "Tries": ({}, ["#### 5", "none", "#### 4"], [["Try again."], ["Try again."], [""]], 1.05, {}),
    "Search": (
        {},
        ["<search>four</search>", "no tag", "<answer>4</answer>"],
        [
            ["\n<information>http://s?four&3</information>\n"],
            ["\n<information>'NoneType' object has no attribute 'group'</information>\n"],
            [""],
        ],
        1.0,
        {"environment_args": {"search_url": "http://s", "topk": 3}},
    ),
    "Query": (
        {"db_id": "shop", "reward_spec": {"ground_truth": "select 4"}},
        ["<sql>select a from t</sql>", "<solution>select max(a) from t</solution>"],
        [["[(3,), (4,)]\n<reminder>3 turns left</reminder>"], [""]],
        1.0,
        {},
    ),
    "Tools": (
        {},
        ["what?", "<tool><python>2+2</python></tool>", "#### 4"],
        [["ValueError: No <tool>...</tool> block found."], ["4"], [""]],
        1.0,
        {},
    ),
}


def played(tmp_path, name, place=f"skyrl_gym:{FILE}", **changes):
    """The first of two equal episodes of a shape, what it was answered, and its reward."""
    row, turns, _, _, options = CASES[name]
    row = {"input": "2+2?", "reward_spec": {"ground_truth": "4"}, **row}
    options = {"max_turns": 4, **options, **changes}
    stage = Stage(tmp_path, turns, rows=[row], environment=f"{place}:{name}", **options)
    rollouts, rewards = stage.sample()
    return stage.text(rollouts[0]), answers_of(rollouts[0]), rewards[0].reward


@pytest.mark.parametrize("name", CASES)
def test_five_shapes_are_played_and_paid_as_under_skyrl(tmp_path, name):
    with sqlite3.connect(tmp_path / "shop.sqlite") as connection:
        connection.execute("create table t (a int)")
        connection.execute("insert into t values (3), (4)")
    options = {"environment_args": {"db_path": str(tmp_path)}} if name == "Query" else {}
    text, answers, reward = played(tmp_path, name, **options)
    assert answers == CASES[name][2]
    assert reward == pytest.approx(CASES[name][3])
    for (answer,) in answers[:-1]:
        assert f"<|im_start|>user\n{answer}<|im_end|>" in text


@pytest.mark.full
def test_a_turn_is_never_replaced_by_what_an_environment_makes_of_it(tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "Rewrites", CASES["Grade"])
    with pytest.raises(RewardError, match=r"postprocessed_action 'so': .* is trained as it was"):
        played(tmp_path, "Rewrites")
