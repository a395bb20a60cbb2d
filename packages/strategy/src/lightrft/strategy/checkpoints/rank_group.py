"""Ranks that act together on files: all succeed, or all raise."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from lightrft.strategy.checkpoints.client_state import CheckpointError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def _alone(value: object) -> list[object]:
    return [value]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that write or read one checkpoint together; the default is a single process.

    Args:
        rank: This process.
        world_size: Number of ranks.
        gather: Collective that returns every rank's object, ordered by rank, on every rank.
    """

    rank: int = 0
    world_size: int = 1
    gather: Callable[[object], Sequence[object]] = _alone

    def together(self, action: Callable[[], Result]) -> list[Result]:
        """Run `action` on every rank; every rank returns all results or raises.

        Raises:
            CheckpointError: It failed on some rank; the message names rank and error.
        """
        outcome: tuple[Result | None, str | None]
        try:
            outcome = action(), None
        except Exception as error:  # raised on all ranks below, so that none waits for another
            logger.exception("rank %d failed", self.rank)
            outcome = None, f"rank {self.rank}: {type(error).__name__}: {error}"
        outcomes = cast("list[tuple[Result, str | None]]", self.gather(outcome))
        problems = [problem for _, problem in outcomes if problem is not None]
        if problems:
            raise CheckpointError("; ".join(problems))
        return [result for result, _ in outcomes]

    def on_first(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0 and return its result on every rank."""
        results = self.together(lambda: action() if self.rank == 0 else None)
        return cast("Result", results[0])


ONE_RANK = RankGroup()
