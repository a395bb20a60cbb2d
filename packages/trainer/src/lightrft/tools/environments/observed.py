"""Environments of one player with the interface of TextArena: observe, act, read the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from lightrft.config import ConfigError
from lightrft.config.registry import load_reference
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.worker import Adapted, EpisodeLostError


class ObservedGame(Protocol):
    """Interface of the author's class."""

    def reset(self, num_players: int, seed: int) -> None:
        """Begin the game."""
        ...

    def get_observation(self) -> tuple[int, str]:
        """Return the player whose turn it is, and the text that the player reads."""
        ...

    def step(self, action: str) -> tuple[bool, object]:
        """Play a turn; return whether the game is over, and further facts."""
        ...

    def close(self) -> Mapping[int, float]:
        """End the game; return the rewards of the players."""
        ...


class ObservedEpisode(Adapted):
    """One game, in which the model is the only player."""

    takes: ClassVar[tuple[str, ...]] = ("seed",)
    answers_turns: ClassVar[bool] = True
    game: ClassVar[type[ObservedGame]]

    @property
    def author(self) -> object:
        """The author's game."""
        return self._game

    def reset(self, **row: object) -> object:
        """Begin the game; return its first observation."""
        self._game = self.game()
        self._is_open = True
        self._game.reset(num_players=1, seed=int(str(row["seed"])))
        return f"\n{self._game.get_observation()[1]}"

    def step(self, action: str) -> object:
        """Play a turn; return the next observation."""
        try:
            self.is_done, _ = self._game.step(action)
            return "" if self.is_done else self._game.get_observation()[1]
        except Exception as error:
            raise EpisodeLostError(f"step raised {type(error).__name__}: {error}") from error

    def get_reward(self) -> float:
        """End the game, over or not, and return the reward of its player."""
        self.close()
        return super().get_reward()

    def close(self) -> None:
        """End the game once."""
        if getattr(self, "_is_open", False):
            self._is_open = False
            self.paid += float(self._game.close()[0])


def observe(text: str) -> type[Adapted]:
    """Return the class of `FILE.py:NAME` or `package.module:NAME`.

    Raises:
        ReportedError: There is no such class, or it has another interface.
    """
    try:
        author = load_reference(text, kind="environment")
    except ConfigError as error:
        raise ReportedError(str(error)) from error
    if not isinstance(author, type) or not {"get_observation", "step"} <= set(dir(author)):
        raise ReportedError(
            f"environment observed:{text}: expected a class with get_observation() and step(action)"
        )
    return type(author.__name__, (ObservedEpisode,), {"game": author})
