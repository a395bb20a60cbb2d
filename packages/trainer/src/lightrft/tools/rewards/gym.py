"""Scores of reasoning-gym, for rows of its tasks."""

import re
from collections.abc import Mapping
from typing import cast

from lightrft.config import ConfigError, RewardOptions
from lightrft.rewards.process import WorkerFailedError, WorkerPool, WorkerTask, WorkerTimeoutError
from lightrft.rewards.types import Columns, Labels, RewardError, RewardResult, Texts
from lightrft.tools.rewards.gym_data import GYM_COLUMN, GYM_PREFIX

ANSWER_SECONDS = 5.0
MAX_ANSWER_CHARACTERS = 20_000
_OPEN, _CLOSE = "<answer>", "</answer>"


class GymReward:
    """The unchanged score of the task's scorer, partial scores included.

    Components: the score under the task's name; `scorer_failed` is 1 if the scorer raised or the
    answer was withheld from it, which scores 0. An answer is undecided if the scorer took more than
    5 s of processor time or ended its process.

    Args:
        config: Options; `reward_timeout_seconds` is the deadline of one call, `reward_workers` the
            number of processes.
        spelling: Reward as `reasoning_gym:NAME`.

    Raises:
        ConfigError: There is no such task, or the package is missing.
    """

    needs_labels = False
    whole_batch = False

    def __init__(self, config: RewardOptions, spelling: str) -> None:
        self.name = spelling.removeprefix(GYM_PREFIX)
        self._spelling = spelling
        self._seconds = config.reward_timeout_seconds
        task = WorkerTask(
            "lightrft.tools.rewards.gym_task", "GymScorer", (self.name,), resident_bytes=4 << 30
        )
        self.parallel_calls = config.reward_workers
        self.workers = WorkerPool(task, size=config.reward_workers, name=spelling)
        try:
            self.workers.start()
        except WorkerFailedError as err:
            raise ConfigError(f"reward {spelling}: {err}") from err

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """Return the score of each response."""
        del prompts, labels
        if not responses:
            return []
        entries = columns.get(GYM_COLUMN, [None] * len(responses))
        for index, entry in enumerate(entries):
            self._require_entry(index, entry)
        answers = [find_answer(response) for response in responses]
        try:
            scores = self.workers.call(
                (answers, list(entries), ANSWER_SECONDS), seconds=self._seconds
            )
        except WorkerTimeoutError as err:
            raise RewardError(
                f"reward {self._spelling}: {len(answers)} answers were not scored within "
                f"{self._seconds:g} s: raise --reward_timeout_seconds"
            ) from err
        except WorkerFailedError as err:
            raise RewardError(f"reward {self._spelling} failed: {err}") from err
        return [self._result(scored) for scored in cast("list[tuple[float, str] | None]", scores)]

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self.workers.close()

    def _require_entry(self, index: int, entry: object) -> None:
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        task = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
        if task != self.name:
            raise RewardError(
                f"reward {self._spelling}: sample {index} is of no row of this task but of "
                f"{task or 'other data'}: give --prompt_data {self._spelling}, and "
                "--reward_recipe where data are mixed"
            )

    def _result(self, scored: tuple[float, str] | None) -> RewardResult | None:
        if scored is None:
            return None
        score, how = scored
        return RewardResult(score, {self.name: score, "scorer_failed": float(how == "failed")})


def find_answer(response: str) -> str:
    """Return the text of the last `<answer>`, closed or not; without one, the last line."""
    start = response.rfind(_OPEN)
    if start >= 0:
        answer = response[start + len(_OPEN) :].partition(_CLOSE)[0].strip()
    else:
        answer = re.split(r"[\r\n]", response.rstrip())[-1].strip()
    return answer if len(answer) <= MAX_ANSWER_CHARACTERS else ""
