"""Tasks of a quick start: exercises, a careless teacher, and the files of the run."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightrft.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

# Role and text.
Message = tuple[str, str]
HELD_OUT_SEED = 12345  # every run is judged on the same exercises
HELD_OUT_SHARE = 10  # one pair of numbers in ten is never trained on


class Exercise(Protocol):
    """A question and its answer."""

    @property
    def question(self) -> str:
        """The prompt."""
        ...

    @property
    def answer(self) -> str:
        """Right number in decimal digits."""
        ...

    def demonstration(self, rng: random.Random) -> list[Message]:
        """Return the conversation as the teacher shows it; the assistant's part is imitated."""
        ...


@dataclass(frozen=True, slots=True)
class MediaModel:
    """A tiny model that reads media.

    Args:
        build: Factory of a random model and its processor, from a seed and the task's tokenizer.
        inputs: Function of the model's inputs for exercises, beside token ids [batch, seq].
    """

    build: "Callable[[int, PreTrainedTokenizerBase], tuple[PreTrainedModel, ProcessorMixin]]"
    inputs: "Callable[[ProcessorMixin, Sequence[Exercise], Tensor], dict[str, Tensor]]"


@dataclass(frozen=True, slots=True)
class Task:
    """A skill that can be taught.

    Args:
        lesson: Subject of the imitation, for the console.
        roles: Marks of the tokenizer beside those of user and assistant.
        whole_tokens: Texts that are one token; all others are characters.
        template: Chat template, in place of that of the tiny models.
        draw: Function that yields exercises without end, for training or held out.
        media_model: Model of a task with media; None is a model of text.
        learning_rate: Peak learning rate of the imitation.
        draw_media: Function that writes the media of an exercise as files whose names begin with a
            path's, and returns the columns that name them.
        reward, environment, agent: Python files in this folder that are copied into the run's,
            where a user edits them as `reward.py`, `environment.py` and `agent.py`.
        adjust: Function that changes the usual configuration of a run in a folder for this task.
        numbers: Fields of `Recipe` that differ for this task.
        flaw: Lines about what the imitator does wrong.
        outlook: Lines about why the first rewards and the held-out accuracy move as they do.
    """

    lesson: str
    roles: tuple[str, ...]
    whole_tokens: tuple[str, ...]
    draw: Callable[[random.Random, bool], Iterator[Exercise]]
    reward: str
    media_model: MediaModel | None = None
    learning_rate: float = 7e-3
    draw_media: Callable[[Exercise, Path], dict[str, object]] = lambda exercise, stem: {}
    template: str | None = None
    environment: str | None = None
    agent: str | None = None
    adjust: Callable[[TrainConfig, Path], TrainConfig] = lambda config, _: config
    numbers: Mapping[str, int] = field(default_factory=dict)
    flaw: tuple[str, ...] = ()
    outlook: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, Path]:
        """Files of this folder by their names in the folder of the run."""
        files = {
            "reward.py": self.reward,
            "environment.py": self.environment,
            "agent.py": self.agent,
        }
        return {name: Path(__file__).with_name(file) for name, file in files.items() if file}


def is_held_out(first: int, second: int) -> bool:
    """Return whether a pair of numbers is for evaluation only; the same in every process."""
    return hash((first, second)) % HELD_OUT_SHARE == 0


def write_exercises(path: Path, task: Task, count: int, *, seed: int, held_out: bool) -> None:
    """Write `count` rows of `prompt` and `answer` as JSONL, with their media beside it."""
    with path.open("w", encoding="utf-8") as stream:
        exercises = islice(task.draw(random.Random(seed), held_out), count)
        for number, exercise in enumerate(exercises):
            row: dict[str, object] = {"prompt": exercise.question, "answer": exercise.answer}
            row |= task.draw_media(exercise, path.with_name(f"{path.stem}-{number}"))
            stream.write(json.dumps(row) + "\n")
