"""What an environment of another make becomes: a class that a worker hosts like an author's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lightrft.rewards.worker import ReportedError

# Of the rows' environments, where `--environment` names a dict of them; TRL's word.
KIND_COLUMN = "environment"


class EpisodeLostError(ReportedError):
    """The state of an episode is gone; nothing it answers from here on counts."""


class Adapted(ABC):
    """One episode of an environment of another make.

    Attributes:
        answers_turns: `step(action)` takes all that is said in a turn, and answers as a user does;
            otherwise `step` is a tool that the model calls.
        is_done: The episode has ended; the answer that came with it is not shown.
    """

    answers_turns: ClassVar[bool] = False
    is_done = False

    @abstractmethod
    def reset(self, seed: int | None = None, **row: object) -> object:
        """Begins the episode; what it returns stands at the end of the user's message."""

    @abstractmethod
    def get_reward(self) -> float:
        """The reward of the whole episode."""

    @classmethod
    def schemas(cls) -> list[object]:
        """Of its tools, as chat templates take them."""
        return []
