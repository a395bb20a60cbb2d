r"""Tasks of a quick start: exercises, a careless teacher, and the files of the run.

The first task is sums of three digits, which are worked out column by column. The teacher forgets
the carry three times out of five, so imitation cannot get past one sum in three. The reward checks
the boxed answer, and reinforcement finds that remembering the carry pays. Every column says its
name and its carry, a forgotten one as +0, so that both are learnt alike.

    What is 457+386?
    careful   <think>ones 7+6+0=13 tens 5+8+1=14 hundreds 4+3+1=8</think>\boxed{843}
    careless  <think>ones 7+6+0=13 tens 5+8+0=13 hundreds 4+3+1=8</think>\boxed{833}
"""

import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightrft.cli.errors import UsageError
from lightrft.config.registry import load_reference

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

HERE = Path(__file__).parent
# Folder of the other quick starts: in the repository, and below where a wheel is installed.
EXAMPLES = "data/share/lightrft/quickstart"
_TASKS = tomllib.loads((HERE / "tasks.toml").read_text("utf-8"))
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
        medium: Name of the mark in a prompt.
        form: Folder and ending of the files.
        build: Factory of a random model and its processor, from a seed and the task's tokenizer.
        inputs: Function of the model's inputs for exercises, beside token ids [batch, seq].
        save: Function that writes an exercise's medium into a file.
    """

    medium: str
    form: tuple[str, str]
    build: "Callable[[int, PreTrainedTokenizerBase], tuple[PreTrainedModel, ProcessorMixin]]"
    inputs: "Callable[[ProcessorMixin, Sequence[Exercise], Tensor], dict[str, Tensor]]"
    save: "Callable[[Exercise, Path], object]"

    def columns(self, exercise: Exercise, data: Path, name: str) -> dict[str, object]:
        """Write an exercise's medium below the folder of the data; return the column of it."""
        folder, ending = self.form
        (data / folder).mkdir(exist_ok=True)
        self.save(exercise, data / folder / f"{name}{ending}")
        return {f"{self.medium}s": [f"{folder}/{name}{ending}"]}


@dataclass(frozen=True, slots=True)
class Task:
    """A skill that can be taught: what `tasks.toml` says of it, and its exercises.

    Args:
        draw: Function that yields exercises without end, for training or held out.
        lesson: Subject of the imitation, for the console.
        flaw, outlook: Lines about the imitator, and about what its reinforcement shows.
        whole_tokens: Texts that are one token.
        files: Files of this folder, or of the examples, by their names in the folder of the run.
        roles: Marks of the tokenizer beside those of user and assistant.
        template: Chat template, in place of that of the tiny models.
        learning_rate: Peak learning rate of the imitation.
        numbers: Fields of `Recipe` that differ for this task.
        options: Options of the run that differ for this task.
        media_model: Model of a task with media; None is a model of text.
    """

    draw: Callable[[random.Random, bool], Iterator[Exercise]]
    lesson: str
    flaw: Sequence[str]
    outlook: Sequence[str]
    whole_tokens: Sequence[str]
    files: Mapping[str, str]
    roles: Sequence[str] = ()
    template: str | None = None
    learning_rate: float = 7e-3
    numbers: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    media_model: MediaModel | None = None

    def copy_files(self, folder: Path) -> None:
        """Copy the files into the folder of a run."""
        for name, file in self.files.items():
            source = HERE / file
            shutil.copyfile(source if source.is_file() else examples_folder() / file, folder / name)


def make_task(
    name: str,
    draw: Callable[[random.Random, bool], Iterator[Exercise]],
    media_model: MediaModel | None = None,
) -> Task:
    """Return a task of `tasks.toml` with its exercises."""
    return Task(draw=draw, media_model=media_model, **_TASKS[name])


def examples_folder() -> Path:
    """Return the folder of the other quick starts, which are files as users write them.

    Raises:
        UsageError: They are not installed.
    """
    checkout = HERE.parents[3] / EXAMPLES
    if checkout.is_dir():
        return checkout
    folder = EXAMPLES.removeprefix("data/")
    for file in files("lightrft-trainer") or ():
        if str(file.parent).endswith(folder):
            return Path(str(file.locate())).resolve().parent
    raise UsageError(f"the examples of {folder} are missing: install the wheel of lightrft-trainer")


def load_example(place: str) -> object:
    """Return what `FILE.py:NAME` names in the folder of the other quick starts."""
    return load_reference(f"{examples_folder()}/{place}", kind="quick start")


def in_folder(options: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return options of a TOML table, with the folder in place of `{folder}`."""

    def filled(value: object) -> object:
        if isinstance(value, list):
            return tuple(map(filled, value))
        return value.format(folder=folder) if isinstance(value, str) else value

    return {name: filled(value) for name, value in options.items()}


def is_held_out(first: int, second: int) -> bool:
    """Return whether a pair of numbers is for evaluation only; the same in every process."""
    return hash((first, second)) % HELD_OUT_SHARE == 0


def write_exercises(path: Path, task: Task, count: int, *, seed: int, held_out: bool) -> None:
    """Write `count` rows of `prompt` and `answer` as JSONL, with their media beside it."""
    with path.open("w", encoding="utf-8") as stream:
        exercises = islice(task.draw(random.Random(seed), held_out), count)
        for number, exercise in enumerate(exercises):
            row: dict[str, object] = {"prompt": exercise.question, "answer": exercise.answer}
            if task.media_model is not None:
                name = f"{path.stem}-{number}"
                row |= task.media_model.columns(exercise, path.parent, name)
            stream.write(json.dumps(row) + "\n")


COLUMNS = ("ones", "tens", "hundreds")
P_FORGET = 0.6


@dataclass(frozen=True, slots=True)
class Addition:
    """Question for one sum of two positive integers."""

    first: int
    second: int

    @property
    def question(self) -> str:
        """The prompt."""
        return f"What is {self.first}+{self.second}?"

    @property
    def answer(self) -> str:
        """Right sum in decimal digits."""
        return str(self.first + self.second)

    def demonstration(self, rng: random.Random) -> list[Message]:
        """Return the question, and a solution as the teacher writes it."""
        return [("user", self.question), ("assistant", demonstrate(self, rng))]


def draw_additions(rng: random.Random, held_out: bool) -> Iterator[Addition]:
    """Yield sums of two three-digit numbers, without end, all on one side of the split."""
    low, high = 10 ** (len(COLUMNS) - 1), 10 ** len(COLUMNS) - 1
    while True:
        addition = Addition(rng.randint(low, high), rng.randint(low, high))
        if is_held_out(addition.first, addition.second) == held_out:
            yield addition


def demonstrate(addition: Addition, rng: random.Random, *, p_forget: float = P_FORGET) -> str:
    """Return a solution column by column from the right, as the teacher writes it.

    Each carry but the last is forgotten with probability `p_forget`; the rest and the boxed answer
    are consistent with the mistake.
    """
    digits_of = (reversed(str(number)) for number in (addition.first, addition.second))
    steps, digits, carry = [], "", 0
    for column, upper, lower in zip(COLUMNS, *digits_of, strict=True):
        if carry and rng.random() < p_forget:
            carry = 0
        total = int(upper) + int(lower) + carry
        steps.append(f"{column} {upper}+{lower}+{carry}={total}")
        carry, digits = total // 10, f"{total % 10}{digits}"
    return f"<think>{' '.join(steps)}</think>\\boxed{{{'1' if carry else ''}{digits}}}"


ADDITION = make_task("addition", draw_additions)
