"""Choosing and combining rewards."""

import pytest
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.config.registry import REWARDS
from lightrft.rewards import CombinedReward, RewardResult, build_reward
from lightrft.strategy.config import ConfigError


class Constant:
    needs_labels = False

    def __init__(self, name, reward, components):
        self.name, self.result, self.is_closed = name, RewardResult(reward, components), False

    def score(self, prompts, responses, labels, columns):
        return [self.result] * len(responses)

    def close(self):
        self.is_closed = True


def test_the_sum_is_weighted_and_components_are_not():
    one = Constant("one", 1.0, {"one": 1.0, "timeout": 0.0})
    two = Constant("two", -4.0, {"two": -4.0, "timeout": 1.0})
    with CombinedReward([one, two], [2.0, 0.5]) as reward:
        results = results_of(reward, ["a", "b"])
    assert [result.reward for result in results] == [0.0, 0.0]
    assert results[0].components == {"one": 1.0, "timeout": 0.0, "two": -4.0, "two/timeout": 1.0}
    assert one.is_closed
    assert two.is_closed
    assert reward.name == "one+two"


# A right and a wrong answer, and the label, of each.
ANSWERS = {
    "boxed_math": (r"\boxed{4}", r"\boxed{5}", "4"),
    "gsm8k": (r"\boxed{4}", r"\boxed{5}", "4"),
    "unit_tests": ("x = 4", "x = 5", "assert x == 4"),
    "verdict": ("Verdict: B", "Verdict: A", "B"),
}


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "judge"])
def test_every_registered_reward_scores_a_right_and_a_wrong_answer(name):
    right, wrong, label = ANSWERS[name]
    with build_reward([name], weights=[0.5]) as reward:
        assert reward.needs_labels
        results = results_of(reward, [right, wrong], [label, label])
    assert [result.reward for result in results] == [0.5, 0.0]


@pytest.mark.parametrize(
    "names, weights, message",
    [
        (
            [],
            None,
            "no reward: set --reward_fn to boxed_math, gsm8k, unit_tests, judge, verdict or FILE",
        ),
        (["gsm8"], None, "unknown reward function 'gsm8'.*did you mean gsm8k"),
        (["gsm8k", "gsm8k"], None, "must differ"),
        (["gsm8k"], [1.0, 2.0], "expected 1 finite numbers"),
        (["gsm8k"], [float("nan")], "expected 1 finite numbers"),
    ],
)
def test_wrong_choices(names, weights, message):
    with pytest.raises(ConfigError, match=message):
        build_reward(names, weights=weights)


def test_deadlines_must_be_positive():
    with pytest.raises(ConfigError, match="reward_timeout_seconds"):
        TrainConfig(reward_timeout_seconds=0)
