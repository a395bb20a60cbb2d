"""Reward functions as TRL, verl and OpenRLHF write them are called as they expect."""

from __future__ import annotations

import pytest

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError
from lightrft.rewards.user import PlainReward, UserReward

PROMPTS, RESPONSES, LABELS = ["2+2=", "3+3="], ["4", "seven"], ["4", "6"]
COLUMNS = {"kind": ["a", "b"], "data_source": ["sums", "sums"], "extra_info": [{"n": 1}, None]}
# Source, rewards, and the components beside the function's own.
SIGNATURES = {
    "TRL, prompts and a column": (
        "def f(prompts, completions, kind, **kwargs):\n"
        "    return [float(p + c == '2+2=4' and k == 'a')\n"
        "            for p, c, k in zip(prompts, completions, kind)]",
        [1.0, 0.0],
        {},
    ),
    "TRL, ground_truth": (
        "def f(completions, ground_truth, **kwargs):\n"
        "    return [float(c == g) for c, g in zip(completions, ground_truth)]",
        [1.0, 0.0],
        {},
    ),
    "TRL, async": (
        "async def f(completions, **kwargs):\n    return [float(len(c)) for c in completions]",
        [1.0, 5.0],
        {},
    ),
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums'\n"
        "    return 1.0 if solution_str == ground_truth else (0.5 if extra_info is None else 0.0)",
        [1.0, 0.5],
        {},
    ),
    "verl, a dict": (
        "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    ok = solution_str == ground_truth\n"
        "    return {'score': 2.0 * ok, 'acc': ok, 'pred': solution_str}",
        [2.0, 0.0],
        {"acc": [1.0, 0.0]},
    ),
    "verl, async": (
        "async def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': 1.0}",
        [1.0, 0.0],
        {"acc": [1.0, 1.0]},
    ),
    "verl, a default of its own": (
        "def f(solution_str, ground_truth, method='strict', format_score=0.25):\n"
        "    return 1.0 if solution_str == ground_truth else format_score",
        [1.0, 0.25],
        {},
    ),
    "verl, a batch": (
        "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [{'score': float(s == g)} for s, g in zip(solution_strs, ground_truths)]",
        [1.0, 0.0],
        {},
    ),
    "OpenRLHF": (
        "def f(queries, prompts, labels):\n"
        "    assert [q[:len(p)] for q, p in zip(queries, prompts)] == prompts\n"
        "    return [float(q == p + y) for q, p, y in zip(queries, prompts, labels)]",
        [1.0, 0.0],
        {},
    ),
    "OpenRLHF, a dict": (
        "def f(queries, prompts, labels, **kwargs):\n"
        "    import numpy as np\n"
        "    found = np.array([float(q == p + y) for q, p, y in zip(queries, prompts, labels)])\n"
        "    return {'rewards': found, 'scores': found, 'extra_logs': {'half': found / 2}}",
        [1.0, 0.0],
        {"half": [0.5, 0.0]},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_of_another_project_is_called_as_it_expects(name):
    source, expected, components = SIGNATURES[name]
    space = {}
    exec(source, space)
    reward = PlainReward("f", space["f"], TrainConfig())
    try:
        reward.check_columns(COLUMNS)
        results = reward.score(PROMPTS, RESPONSES, LABELS, COLUMNS)
    finally:
        reward.close()
    assert [result.reward for result in results] == expected
    for name, values in components.items():
        assert [result.components[name] for result in results] == values
    known = {"f", *components}
    assert all(set(result.components) <= known for result in results)


IN_A_FILE = ("TRL, ground_truth", "verl, a dict", "OpenRLHF, a dict")


def test_the_same_in_a_file_and_without_the_columns_of_verl(tmp_path):
    for number, name in enumerate(IN_A_FILE):
        path = tmp_path / f"r{number}.py"
        path.write_text(SIGNATURES[name][0].replace("ok =", "ok = data_source is None and"))
        reward = UserReward(path, "f", TrainConfig())
        try:
            reward.check_columns([])
            results = reward.score(PROMPTS, RESPONSES, LABELS, {})
        finally:
            reward.close()
        assert [result.reward for result in results] == SIGNATURES[name][1]


def test_arguments_of_a_function_of_verl_come_from_reward_args():
    space = {}
    exec(SIGNATURES["verl, a default of its own"][0], space)
    config = TrainConfig(reward_args={"format_score": 0.75})
    reward = PlainReward("f", space["f"], config)
    results = reward.score(PROMPTS, RESPONSES, LABELS, {})
    reward.close()
    assert [result.reward for result in results] == [1.0, 0.75]


@pytest.mark.parametrize(
    ("name", "there"),
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
