"""What environments pay turn by turn stands where the turns end, and is part of the reward."""

import numpy as np
import pytest
import torch
from tests.rollout.stages import CASES, TEXT, Stage, call

from lightrft.records.batch import collate
from lightrft.records.table import tabulate
from lightrft.rewards.build import build_reward

PAYING = '''
class OnlyCalls:
    """Pays each call, more for a long word."""

    def reset(self, **row):
        self.paid = self.said = 0.0

    def say(self, word: str) -> str:
        """Say.

        Args:
            word: A word.
        """
        if word == "bad":
            self.paid -= 1
            raise ValueError(word)
        self.paid += len(word) / 4
        return word

    async def get_call_reward(self):
        found, self.paid = self.paid, 0.0
        return found


class Paying(OnlyCalls):
    """Pays at the end, too."""

    def get_reward(self):
        return {"end": 0.5}


class Broken(Paying):
    def get_call_reward(self):
        return "much"


def letters(responses):
    return [0.125 for _ in responses]
'''


def sampled(tmp_path, environment, turns, **options):
    """The samples of a step of two equal episodes; the environment may be one of `PAYING`."""
    (tmp_path / "paying.py").write_text(PAYING)
    if ":" not in environment:
        environment = f"{tmp_path / 'paying.py'}:{environment}"
    stage = Stage(tmp_path, turns, environment=environment, **options)
    with build_reward(stage.config.reward_fn, has_models=True, config=stage.config) as reward:
        return stage.collect(reward)


def paid_at(samples):
    """Of the first sample: the number of each turn that ends in a reward, and the reward."""
    table = tabulate(samples.scored[:1])
    values = table["turn_rewards"]
    turns = np.cumsum(np.diff(table.is_sampled, prepend=False) & table.is_sampled) - 1
    ends = table.is_sampled & ~np.append(table.is_sampled[1:], False)
    assert not values[~ends].any()
    return [(int(turns[i]), float(values[i])) for i in np.flatnonzero(values)]


@pytest.mark.full
def test_calls_are_paid_where_their_turn_ends(tmp_path):
    turns = [call("say", word="to") + call("say", word="four"), call("say", word="bad"), "done"]
    functions = (f"{tmp_path / 'paying.py'}:letters",)
    samples = sampled(tmp_path, "Paying", turns, reward_fn=functions)
    assert paid_at(samples) == [(0, 1.5), (1, -1.0)]
    assert samples.scored[0].reward == 1.5 - 1.0 + 0.5 + 0.125
    assert dict(samples.scored[0].components) == {"letters": 0.125, "Paying": 1.0, "end": 0.5}
    batch = collate(tabulate(samples.scored), temperature=1.0, device=torch.device("cpu"))
    assert batch.facts["turn_rewards"].sum(-1).tolist() == [0.5, 0.5]


@pytest.mark.full
def test_a_class_may_pay_its_calls_alone(tmp_path):
    samples = sampled(tmp_path, "OnlyCalls", [call("say", word="four"), "done"])
    assert paid_at(samples) == [(0, 1.0)]
    assert samples.scored[0].reward == 1.0


@pytest.mark.full
def test_turns_of_a_skyrl_gym_class_are_paid_where_they_end(tmp_path):
    samples = sampled(tmp_path, f"skyrl_gym:{TEXT}:Countdown", ["1", "2", "7"])
    assert paid_at(samples) == [(0, -0.25), (1, -0.25), (2, 1.0)]
    assert samples.scored[0].reward == 0.5
    # Nothing is sent of rows without such rewards, and nothing stands in their batch.
    samples = sampled(tmp_path, f"{CASES}:Guess", [call("guess", number=7), "done"])
    assert not samples.table["has_turn_rewards"].any()
    batch = collate(tabulate(samples.scored), temperature=1.0, device=torch.device("cpu"))
    assert "turn_rewards" not in batch.facts


@pytest.mark.full
def test_a_reward_of_a_call_that_is_no_number_fails_the_episode(tmp_path):
    with pytest.raises(Exception, match="get_call_reward: expected a number, got 'much'"):
        sampled(tmp_path, "Broken", [call("say", word="to"), "done"])
