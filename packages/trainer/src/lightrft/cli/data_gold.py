"""The reference answers of a data set, scored by the reward of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightrft.config import TrainConfig
from lightrft.config.registry import REWARDS
from lightrft.datasets.check import CheckedRow
from lightrft.rewards import CombinedReward, build_reward
from lightrft.rewards.errors import RewardError

MAX_ROWS = 500
FORMS = {
    "as it is": "{}",
    "as \\boxed{...}": "\\boxed{{{}}}",
    "after ####": "#### {}",
}
"""How a reference answer may stand in a response."""


@dataclass(frozen=True, slots=True)
class GoldScore:
    """What the reward gives to reference answers.

    Args:
        names: Of the rewards.
        num_rows: Rows that were scored, the first ones.
        means: Mean reward by form of the answer, for rows that could be scored.
        problems: One line for each row whose reference answer cannot be scored, or gets less than
            1 in every form from a reward that knows right from wrong.
    """

    names: tuple[str, ...]
    num_rows: int
    means: dict[str, float]
    problems: tuple[str, ...]


def score_labels(rows: Sequence[CheckedRow], config: TrainConfig) -> GoldScore:
    """Scores the reference answers of the first rows in the forms of `FORMS`.

    Args:
        rows: With or without reference answers.
        config: Rewards, their deadlines, and arguments of own functions.

    Raises:
        ConfigError, RewardError: A reward that cannot be loaded.
    """
    names, chosen = config.reward_fn, rows[:MAX_ROWS]
    with build_reward(names, config=config) as reward:
        by_form = {form: _score(reward, chosen, text) for form, text in FORMS.items()}
    knows_right = all(REWARDS.is_built_in(name) for name in names)
    problems = []
    for position, row in enumerate(chosen):
        outcomes = [scores[position] for scores in by_form.values()]
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        best = max((outcome for outcome in outcomes if isinstance(outcome, float)), default=None)
        if best is None:
            problems.append(f"{row.location}: {errors[0]}")
        elif knows_right and best < 1:
            problems.append(
                f"{row.location}: the reference answer {str(row.label)[:60]!r} gets {best:g} from "
                f"{' + '.join(names)}: expected 1"
            )
    means = {
        form: fmean(numbers)
        for form, scores in by_form.items()
        if (numbers := [score for score in scores if not isinstance(score, str)])
    }
    return GoldScore(tuple(names), len(chosen), means, tuple(problems))


def _score(reward: CombinedReward, rows: Sequence[CheckedRow], form: str) -> list[float | str]:
    """Reward or error of each row."""
    try:
        return list(_call(reward, rows, form))
    except RewardError:
        found: list[float | str] = []
        for row in rows:  # one by one, to find those that cannot be scored
            try:
                found += _call(reward, [row], form)
            except RewardError as error:
                found.append(str(error))
        return found


def _call(reward: CombinedReward, rows: Sequence[CheckedRow], form: str) -> list[float]:
    names = sorted({name for row in rows for name in row.columns})
    results = reward.score(
        [row.text for row in rows],
        [form.format(row.label or "") for row in rows],
        [row.label for row in rows],
        {name: [row.columns.get(name) for row in rows] for name in names},
    )
    return [result.reward for result in results]
