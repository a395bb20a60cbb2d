"""Rows of the tasks of reasoning-gym: `reasoning_gym:NAME?size=1000&seed=0&OPTION=VALUE`."""

import json
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from lightrft.datasets.types import DataError

# Prefix of reasoning-gym's tasks, as data and as rewards, and the column of their entries.
GYM_PREFIX, GYM_COLUMN = "reasoning_gym:", "reasoning_gym"
_DEFAULTS = {"size": 1000, "test_size": 100, "seed": 0}
_NAME = re.compile(r"\w+", re.ASCII)


def gym_rows(text: str, split: str) -> Iterator[Mapping[str, object]]:
    """Yield the rows of one split: `input`, `label`, `task` and the entry that the score needs.

    Both splits come from one sequence that the seed begins, test after train. Row i depends only on
    seed + i, so neighbouring seeds share nearly all rows.

    Raises:
        DataError: The source is misspelled, the package is missing, or there is no such task,
            option or split.
    """
    name, options = split_query(text, GYM_PREFIX)
    if not _NAME.fullmatch(name):
        raise DataError(f"{text}: expected {GYM_PREFIX}NAME, the name of a task")
    size, test_size, seed = (_whole_number(text, options, key) for key in _DEFAULTS)
    ranges = {"train": range(size), "test": range(size, size + test_size)}
    if split not in ranges:
        raise DataError(f"{text} has no split {split!r}: expected train or test")
    try:
        import reasoning_gym
    except ImportError as err:
        raise DataError(
            f"{text}: tasks of reasoning-gym need the extra reasoning-gym "
            "(pip install 'lightrft[reasoning-gym]')"
        ) from err
    try:
        rows = reasoning_gym.create_dataset(name, size=size + test_size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as err:
        reason = next(iter(str(err).splitlines()), type(err).__name__)
        raise DataError(f"{text}: reasoning-gym refuses it: {reason}") from err
    for index in ranges[split]:
        entry = rows[index]
        yield {
            "input": entry["question"],
            "label": entry["answer"],
            "task": name,
            GYM_COLUMN: entry,
        }


def _whole_number(text: str, options: dict[str, object], key: str) -> int:
    """Take one of our own options out of a task's options."""
    value = options.pop(key, _DEFAULTS[key])
    if not isinstance(value, int) or isinstance(value, bool) or value < (key == "size"):
        raise DataError(f"{text}: {key} must be a whole number, got {value!r}")
    return value


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
