"""Classes and reward functions in the shapes that TRL's examples, documents and tests have."""

import random
import threading


class Increments:
    """State in a private name, no reward of its own; a reward function scores the text."""

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


class Scored(Increments):
    """Owns its reward, awaited."""

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


class ReadsRow:
    """Takes a column by name and all others together."""

    def reset(self, target, **kwargs) -> None:
        self.left, self.others = target, sorted(kwargs)

    def take(self, count: int) -> str:
        """
        Take some.

        Args:
            count: So many.
        """
        self.left -= count
        return f"{self.left} left"


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


class Falls:
    """A game that ends: later moves raise, and so do wrong ones."""

    ROWS = 2

    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str:
        self.row, self.place, self.reward, self.done = 0, 1, 0.0, False
        return self._show(self.place)

    @staticmethod
    def _show(place: int) -> str:
        return f"The ball is {place} to the right."

    def _act(self, step: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        self.row, self.place = self.row + 1, self.place - step
        self.done = self.row == Falls.ROWS
        if self.done:
            self.reward = 1.0 if self.place == 0 else -1.0
        return self._show(self.place)

    def move(self, direction: str) -> str:
        """Move the paddle.

        Args:
            direction: Either "left" or "right".
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}")
        return self._act(1 if direction == "right" else -1)

    def stay(self) -> str:
        """Let it fall."""
        return self._act(0)


class Several:
    """One class for several tasks, of which a column of the row names one."""

    def __init__(self):
        self.active = None

    def reset(self, **kwargs) -> str | None:
        self.active, self.reward = kwargs.get("env", "words"), 0.0
        return "Guess." if self.active == "words" else "Press."

    def guess(self, word: str) -> str:
        """
        Guess a word.

        Args:
            word: The word.
        """
        if self.active != "words":
            raise ValueError("guess is only for words")
        self.reward = float(word == "crane")
        return "GGGGG" if self.reward else "XXXXX"

    def press(self) -> str:
        """Press the button."""
        if self.active != "buttons":
            raise ValueError("press is only for buttons")
        self.reward += 0.5
        return "click"


class Board:
    """Draws while it is played, and keeps nested lists and a score."""

    def __init__(self):
        self.score = 0

    def reset(self, **kwargs) -> str:
        self.score, self.board = 0, [[0, 0], [0, 0]]
        self._spawn()
        return f"\n{self.board}"

    def _spawn(self) -> None:
        free = [(i, j) for i in range(2) for j in range(2) if not self.board[i][j]]
        if free:
            i, j = random.choice(free)
            self.board[i][j] = 4 if random.random() < 0.1 else 2

    def slide(self, direction: str) -> str:
        """
        Slide all tiles.

        Args:
            direction: One of "up" and "down".
        """
        self.score += 2
        self._spawn()
        return f"score={self.score}\n{self.board}"

    @property
    def largest(self) -> int:
        return max(map(max, self.board))


SHAPES = {
    each.__name__.lower(): each
    for each in (Increments, Scored, OwnsData, ReadsRow, Echoes, Falls, Several, Board)
}


def format_reward(completions, **kwargs):
    return [0.25 if "done" in text else 0.0 for text in completions]


def state_reward(environments, **kwargs):
    return [e.reward if isinstance(e, Echoes | Several) else None for e in environments]


def fall_reward(environments, **kwargs) -> list[float | None]:
    found = []
    for env in environments:
        if not isinstance(env, Falls):
            found.append(None)
        else:
            found.append(max(env.reward, 0.0) if env.done else 0.0)
    return found


def board_reward(environments, environment, **kwargs):
    return [
        e.score + (e.largest >= 2) * 0.5 + 0 * len(e.board) if name == "board" else None
        for e, name in zip(environments, environment, strict=True)
    ]


def left_reward(prompts, completions, environments, target, **kwargs):
    return [
        1.0 / (1 + env.left) if wanted is not None else 0.0
        for env, wanted in zip(environments, target, strict=True)
    ]


def client_reward(environments, **kwargs):
    return [1.0 if env.env else 0.0 for env in environments]
