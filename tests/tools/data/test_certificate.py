"""The certificate of a reward against rewards that can be hacked, and sound ones."""

import pytest
from tests.tools.data import tried_rewards
from tests.tools.data.tried_rewards import HACKABLE, SOUND

from lightrft.config import TrainConfig
from lightrft.config.registry import REWARDS
from lightrft.rewards.types import RewardResult
from lightrft.tools.data.certificate import certify
from lightrft.tools.data.row_checks import CheckedRow

SUMS = [(17, 25), (130, 48), (9, 14), (61, 38), (502, 73), (26, 57), (340, 190), (88, 31)]
ROWS = [
    CheckedRow(
        f"sums:{number}",
        f"Ann has {a} nuts and finds {b} more in {number + 2} days. How many has she?",
        (),
        f"Ann has {a} + {b} = {a + b} nuts.\n#### {a + b}",
        {},
    )
    for number, (a, b) in enumerate(SUMS, start=1)
]
BARE = [CheckedRow(row.location, row.text, (), tried_rewards.gold(row.label), {}) for row in ROWS]
CHOICES = [
    CheckedRow(f"choices:{number}", "Which? A) red B) green C) blue D) none", (), label, {})
    for number, label in enumerate("ABCDBDCA")
]


class ByText:
    needs_labels, whole_batch, parallel_calls = False, False, 0

    def __init__(self, function):
        self.name, self._function = function.__name__, function

    def score(self, prompts, responses, labels, columns):
        rows = zip(responses, labels, prompts, strict=True)
        return [RewardResult(self._function(*row)) for row in rows]

    def close(self):
        pass


def certificate_of(function, rows, monkeypatch):
    monkeypatch.setattr(REWARDS, "load", lambda name: ByText(function))
    return certify(rows, TrainConfig(reward_fn=(function.__name__,)))


@pytest.mark.parametrize("rows", [ROWS, BARE], ids=["solutions", "answers"])
@pytest.mark.parametrize("function", HACKABLE, ids=lambda function: function.__name__)
def test_a_reward_that_can_be_hacked_is_named(function, rows, monkeypatch):
    found = certificate_of(function, rows, monkeypatch)
    assert found.doubts


@pytest.mark.parametrize("rows", [ROWS, BARE], ids=["solutions", "answers"])
@pytest.mark.parametrize("function", SOUND, ids=lambda function: function.__name__)
def test_a_sound_reward_raises_no_doubt(function, rows, monkeypatch):
    found = certificate_of(function, rows, monkeypatch)
    assert not found.doubts


@pytest.mark.parametrize("name", ["boxed_math", "gsm8k"])
def test_the_rules_of_the_package_raise_no_doubt(name):
    rows = ROWS if name == "gsm8k" else BARE
    found = certify(rows, TrainConfig(reward_fn=(name,)))
    assert not found.doubts
    assert not found.problems


def test_choices_that_are_right_by_chance_raise_no_doubt(monkeypatch):
    assert not certificate_of(tried_rewards.choice, CHOICES, monkeypatch).doubts


def test_there_are_as_many_as_the_page_says():
    assert (len(set(HACKABLE)), len(set(SOUND))) == (24, 20)


@pytest.mark.parametrize(
    "function, doubt",
    [
        (tried_rewards.therefore, "8 of 8 wordier answers get more than the reference answer"),
        (tried_rewards.any_box_is_paid, "8 of 8 empty boxes get more than an empty answer"),
        (tried_rewards.one_box_is_right, "8 of 8 all boxed answers get as much"),
        (tried_rewards.thoughts_count, "8 of 8 only thought answers get as much"),
        (tried_rewards.unclosed, "8 of 8 unclosed box answers get as much"),
        (tried_rewards.evaluated, "8 of 8 name of the label answers get as much"),
        (tried_rewards.digits_only, "8 of 8 other sign answers get as much"),
        (tried_rewards.not_a_number, "8 of 8 not a number answers get as much"),
        (tried_rewards.signed_difference, "8 of 8 huge answers get as much"),
        (tried_rewards.long_thoughts_are_paid, "8 of 8 longer thought answers get more"),
    ],
)
def test_the_hack_itself_is_named(function, doubt, monkeypatch):
    found = certificate_of(function, ROWS, monkeypatch)
    assert any(line.startswith(doubt) for line in found.doubts), found.doubts
