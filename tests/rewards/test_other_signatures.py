"""Reward functions as TRL, verl and OpenRLHF write them are called as they expect."""

import tomllib
from pathlib import Path

import pytest

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError
from lightrft.rewards.user import PlainReward, UserReward

PROMPTS, RESPONSES, LABELS = ["2+2=", "3+3="], ["4", "seven"], ["4", "6"]
COLUMNS = {"kind": ["a", "b"], "data_source": ["sums", "sums"], "extra_info": [{"n": 1}, None]}
SIGNATURES = tomllib.loads(Path(__file__).with_name("other_signatures.toml").read_text("utf-8"))


def function_of(name):
    space = {}
    exec(SIGNATURES[name]["source"], space)
    return space["f"]


def scored(reward, columns, name):
    """Results of a function, whose rewards are those of its signature."""
    try:
        reward.check_columns(columns)
        results = reward.score(PROMPTS, RESPONSES, LABELS, columns)
    finally:
        reward.close()
    assert [result.reward for result in results] == SIGNATURES[name]["rewards"]
    return results


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_of_another_project_is_called_as_it_expects(name):
    components = SIGNATURES[name].get("components", {})
    reward = PlainReward("f", function_of(name), TrainConfig())
    results = scored(reward, COLUMNS, name)
    for part, values in components.items():
        assert [result.components[part] for result in results] == values
    known = {"f", *components}
    assert all(set(result.components) <= known for result in results)


IN_A_FILE = ("TRL, ground_truth", "verl, a dict", "OpenRLHF, a dict")


def test_the_same_in_a_file_and_without_the_columns_of_verl(tmp_path):
    for number, name in enumerate(IN_A_FILE):
        path = tmp_path / f"r{number}.py"
        source = SIGNATURES[name]["source"]
        path.write_text(source.replace("ok =", "ok = data_source is None and"))
        reward = UserReward(path, "f", TrainConfig())
        scored(reward, {}, name)


def test_arguments_of_a_function_of_verl_come_from_reward_args():
    config = TrainConfig(reward_args={"format_score": 0.75})
    reward = PlainReward("f", function_of("verl, a default of its own"), config)
    results = reward.score(PROMPTS, RESPONSES, LABELS, {})
    reward.close()
    assert [result.reward for result in results] == [1.0, 0.75]


@pytest.mark.parametrize(
    "name, there",
    [
        ("environments", "train with --environment"),
        ("completion_ids", "a parameter responses"),
        ("trainer_state", "leave it out"),
        ("log_metric", "return a dict of numbers for each response"),
        ("reward_router_address", "reward judge"),
        ("answer", "rename it or give it a default"),
    ],
)
def test_what_has_no_counterpart_says_what_to_do(name, there):
    space = {}
    exec(f"def f(completions, {name}): return [0.0]", space)
    reward = PlainReward("f", space["f"], TrainConfig())
    with pytest.raises(RewardError, match=f"'{name}'.*beside prompts, responses.*{there}"):
        reward.check_columns(COLUMNS)
    reward.close()
