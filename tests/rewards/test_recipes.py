"""Weights of rewards by row."""

import pytest
from tests.rewards.asking import results_of

from lightrft.rewards.build import CombinedReward, build_reward, load_recipes
from lightrft.rewards.types import RewardError, RewardResult
from lightrft.strategy.config import ConfigError


class Length:
    needs_labels = False

    def __init__(self, name, factor):
        self.name, self.factor, self.seen = name, factor, []

    def score(self, prompts, responses, labels, columns):
        self.seen.append(list(responses))
        return [
            RewardResult(self.factor * len(r), {self.name: self.factor * len(r)}) for r in responses
        ]

    def close(self):
        pass


def recipes(tmp_path, text, names=("one", "ten", "model")):
    (tmp_path / "recipes.toml").write_text(text)
    return load_recipes(tmp_path / "recipes.toml", column="task", names=names)


def test_each_row_is_scored_by_the_rewards_of_its_recipe(tmp_path):
    found = recipes(tmp_path, "[math]\none = 2.0\n[chat]\none = 0.5\nten = 1\n[free]\nmodel = 1\n")
    one, ten = Length("one", 1), Length("ten", 10)
    combined = CombinedReward([one, ten], [1.0, 1.0], recipes=found)
    results = results_of(
        combined, ["a", "bb", "ccc", "dddd"], task=["math", "chat", "free", "math"]
    )
    assert [r.reward for r in results] == [2.0, 0.5 * 2 + 20, 0.0, 8.0]
    assert [dict(r.components) for r in results] == [
        {"one": 1},
        {"one": 2, "ten": 20},
        {},
        {"one": 4},
    ]
    assert one.seen == [["a", "bb", "dddd"]]
    assert ten.seen == [["bb"]]
    with pytest.raises(RewardError, match="no reward recipe for 'code' in column 'task'"):
        results_of(combined, ["a"], task=["code"])


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[math]\ntwo = 1", "got two = 1 in .math., expected a number for one of model, one, ten"),
        ("[math]\none = true", "got one = True"),
        ("math = 1", "expected a table"),
        ("", "has no tables"),
        ("[math", "cannot read"),
    ],
)
def test_wrong_recipes_are_told(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem):
        recipes(tmp_path, text)


def test_names_must_differ_and_functions_may_be_missing_beside_models(tmp_path):
    with pytest.raises(ConfigError, match="different names"):
        recipes(tmp_path, "[a]\none = 1", names=("one", "one"))
    with build_reward([], has_models=True) as nothing:
        assert results_of(nothing, ["r"]) == [RewardResult(0.0)]
