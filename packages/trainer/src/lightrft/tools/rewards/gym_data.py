"""Rows of the tasks of reasoning-gym: `reasoning_gym:NAME?size=1000&seed=0&OPTION=VALUE`."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from lightrft.datasets.types import DataError

# Prefix of reasoning-gym's tasks, as data and as rewards, and the column of their entries.
GYM_PREFIX, GYM_COLUMN = "reasoning_gym:", "reasoning_gym"
_OWN = {"size": 1000, "test_size": 100, "seed": 0}
_NAME = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True, slots=True)
class GymSource:
    """One task with its options.

    Args:
        name: Name of the task.
        size, test_size: Numbers of rows of the splits train and test.
        seed: Seed of both splits. The rows of test follow those of train in one sequence. Row i
            depends only on seed + i, so neighbouring seeds share nearly all rows.
        options: Options of the task.
    """

    name: str
    size: int
    test_size: int
    seed: int
    options: Mapping[str, object]


def parse_gym_source(text: str) -> GymSource:
    """Return the task that a source names.

    Raises:
        DataError: The source is misspelled.
    """
    name, options = split_query(text, GYM_PREFIX)
    if not _NAME.fullmatch(name):
        raise DataError(f"{text}: expected {GYM_PREFIX}NAME, the name of a task")
    settings = {key: options.pop(key, default) for key, default in _OWN.items()}
    numbers = {}
    for key, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < (key == "size"):
            raise DataError(f"{text}: {key} must be a whole number, got {value!r}")
        numbers[key] = value
    return GymSource(name, options=options, **numbers)


def gym_rows(text: str, split: str) -> Iterator[Mapping[str, object]]:
    """Yield the rows of one split: `input`, `label`, `task` and the entry that the score needs.

    Raises:
        DataError: The package is missing, or there is no such task, option or split.
    """
    source = parse_gym_source(text)
    ranges = {
        "train": range(source.size),
        "test": range(source.size, source.size + source.test_size),
    }
    if split not in ranges:
        raise DataError(f"{text} has no split {split!r}: found train, test")
    try:
        import reasoning_gym
    except ImportError as err:
        raise DataError(
            f"{text}: tasks of reasoning-gym need the extra reasoning-gym "
            "(pip install 'lightrft[reasoning-gym]')"
        ) from err
    try:
        made = reasoning_gym.create_dataset(
            source.name, size=source.size + source.test_size, seed=source.seed, **source.options
        )
    except (ValueError, TypeError, AssertionError) as err:
        reason = next(iter(str(err).splitlines()), type(err).__name__)
        raise DataError(f"{text}: reasoning-gym refuses it: {reason}") from err
    for index in ranges[split]:
        entry = made[index]
        yield {
            "input": entry["question"],
            "label": entry["answer"],
            "task": source.name,
            GYM_COLUMN: entry,
        }


def split_query(text: str, prefix: str) -> tuple[str, dict[str, object]]:
    """Return the name and options of a source; values are JSON where possible, else texts.

    Args:
        text: Source from the command line.
        prefix: Prefix `KIND:`, which may be missing.

    Raises:
        DataError: The source is misspelled.
    """
    what, _, query = text.removeprefix(prefix).partition("?")
    pairs = [part.partition("=") for part in query.split("&")] if query else []
    if not what or any(not key or not mark for key, mark, _ in pairs):
        raise DataError(f"{text}: expected {prefix}NAME?OPTION=VALUE&OPTION=VALUE")
    return what, {key: _value(unquote(value)) for key, _, value in pairs}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
