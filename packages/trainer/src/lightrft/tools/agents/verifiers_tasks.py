"""Environments of verifiers and rows of their tasks: `verifiers:NAME?taskset.OPTION=VALUE`.

Options have the paths of an environment's `[env]` block; `select.*` are those of verifiers'
selection of tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lightrft.config.printable import one_line
from lightrft.datasets.types import DataError
from lightrft.tools.rewards.gym_data import split_query

if TYPE_CHECKING:
    from verifiers.v1 import EnvConfig

PREFIX, COLUMN = "verifiers:", "verifiers"
Options = dict[str, object]
_SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """An environment with its options.

    Args:
        text: Text that names it.
        name: Name of the taskset, an installed module.
        options: Options of the environment, nested.
        select: Options of the selection of tasks, nested.
    """

    text: str
    name: str
    options: Options
    select: Options

    def config(self) -> EnvConfig:
        """Return the environment's options, checked by verifiers.

        Raises:
            DataError: The package or the environment is missing, or an option is wrong.
        """
        try:
            from verifiers.v1.utils.loaders import resolve_env_config
        except ImportError as error:
            raise DataError(
                f"{self.text}: needs verifiers 0.4 (uv pip install verifiers==0.4.0): "
                f"{one_line(str(error))}"
            ) from error
        taskset = self.options.get("taskset", {})
        if not isinstance(taskset, dict):
            raise DataError(f"{self.text}: taskset has options of its own: give taskset.OPTION")
        try:
            return resolve_env_config({**self.options, "taskset": {**taskset, "id": self.name}})
        except Exception as error:
            raise DataError(f"{self.text}: {_reason(error)}") from error


def read_source(text: str) -> EnvironmentSource:
    """Parse the environment that a text names.

    Raises:
        DataError: The text is malformed.
    """
    name, values = split_query(text, PREFIX)
    options: Options = {}
    for path, value in values.items():
        *above, last = path.replace("-", "_").split(".")
        inner = options
        for part in above:
            inner = cast("Options", inner.setdefault(part, {}))
            if not isinstance(inner, dict):
                raise DataError(f"{text}: {path} lies below an option that has a value itself")
        # A harness has the name null; option files of verifiers have no None.
        inner[last] = "null" if value is None else value
    select = options.pop("select", {})
    if not isinstance(select, dict):
        raise DataError(f"{text}: select has options of its own: give select.limit and others")
    return EnvironmentSource(text, name, options, select)


def task_rows(text: str, split: str) -> Iterator[Mapping[str, object]]:
    """Yield a row for each task: `input` (text), `task` (name) and `verifiers` (data).

    Raises:
        DataError: The environment is unavailable, or has no tasks or infinitely many.
    """
    source = read_source(text)
    if split not in _SPLITS:
        raise DataError(
            f"{text} has no split {split!r}: both {' and '.join(_SPLITS)} are all that select "
            "chooses"
        )
    config = source.config()
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    count = 0
    try:
        chosen = load_taskset(config.taskset).select(SelectConfig.model_validate(source.select))
        if not chosen.bounded:
            raise DataError("the task set is infinite: limit it with select.limit=N")
        for task in chosen:
            count += 1
            data = task.data
            yield {
                "input": data.prompt_text or data.description or data.name or f"task {data.idx}",
                "task": source.name,
                COLUMN: data.model_dump(mode="json"),
            }
    except Exception as error:
        raise DataError(f"{text}: {_reason(error)}") from error
    if not count:
        raise DataError(f"{text}: it has no tasks, or select leaves none")


def _reason(error: Exception) -> str:
    """Return the message of verifiers or an environment, with its cause."""
    if isinstance(error, DataError):
        return str(error)
    cause = "" if error.__cause__ is None else f" ({error.__cause__})"
    return one_line(f"{type(error).__name__}: {error}{cause}", limit=400)
