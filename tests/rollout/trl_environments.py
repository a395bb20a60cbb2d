"""Classes and reward functions in the shapes that TRL's examples, documents and tests have."""

import random
import threading


class Scored:
    """State in a private name; owns its reward, awaited."""

    def reset(self, **kwargs):
        self._counter = 0

    def increment(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: What is added.

        Returns:
            The counter.
        """
        self._counter += step
        return self._counter

    async def get_reward(self) -> float:
        return float(self._counter)


class OwnsData:
    """Draws its task, and returns the whole prompt of a row that has none."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Reach {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def jump(self, step: int) -> int:
        """
        Go on.

        Args:
            step: How far.
        """
        self.counter += step
        return self.counter


class Client:
    """Stands for a connection: it cannot leave its process."""

    def __init__(self):
        self.lock = threading.Lock()

    def send(self, text):
        return text.upper(), len(text) / 10


class Echoes:
    """Holds a client since its construction, and its reward in an attribute."""

    def __init__(self):
        self.env = Client()
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Say it back.

        Args:
            message: What is said.

        Returns:
            The same.
        """
        told, self.reward = self.env.send(message)
        return told


class Board:
    """Takes a column by name, keeps nested lists and a score, and raises at wrong moves."""

    def reset(self, size, **kwargs) -> str:
        self.score, self.board = 0, [[0] * size for _ in range(size)]
        return f"\n{self.board}"

    def slide(self, direction: str) -> str:
        """
        Slide all tiles.

        Args:
            direction: One of "up" and "down".
        """
        if direction not in ("up", "down"):
            raise ValueError(f"Invalid direction {direction!r}")
        self.score += 2
        self.board[0][0] += 2
        return f"score={self.score}"

    @property
    def largest(self) -> int:
        return max(map(max, self.board))


SHAPES = {each.__name__.lower(): each for each in (Scored, OwnsData, Echoes, Board)}


def format_reward(completions, **kwargs):
    return [0.25 if "done" in text else 0.0 for text in completions]


def state_reward(environments, **kwargs) -> list[float | None]:
    return [e.reward if isinstance(e, Echoes) else None for e in environments]


def board_reward(environments, environment, **kwargs):
    return [
        e.score + (e.largest >= 2) * 0.5 + 0 * len(e.board) if name == "board" else None
        for e, name in zip(environments, environment, strict=True)
    ]


def client_reward(environments, **kwargs):
    return [1.0 if env.env else 0.0 for env in environments]
