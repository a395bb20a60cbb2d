"""Reward functions of a user's Python file, run in a process that can be killed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightrft.config.registry import keyword_options
from lightrft.rewards.errors import RewardError
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.types import RewardResult
from lightrft.rewards.user_task import MissingFunctionError, checked_results
from lightrft.strategy.config import ConfigError

ARGUMENTS = ("prompts", "responses", "labels")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a user's function can be called with.

    Args:
        names: Parameters that can be given by keyword.
        required: Those without a default.
        takes_all: It has `**keywords`.
        keyword_only: Parameters that can be given by keyword only.
    """

    names: frozenset[str]
    required: frozenset[str]
    takes_all: bool
    keyword_only: frozenset[str]


class PlainReward:
    """A function `f(prompts=, responses=, labels=, **columns)` of this process.

    It is one of a module, or was added by `lightrft.config.register`; nothing stops it if it hangs.

    Args:
        name: Of its component.
        function: Gets what it has a parameter for; results as for `UserReward`.
        arguments: Values of its keyword-only arguments; others of the names are left out.
    """

    needs_labels = False

    def __init__(
        self, name: str, function: Callable[..., object], arguments: Mapping[str, object]
    ) -> None:
        self.name = name.rpartition(":")[2]
        own = keyword_options(function)
        self._function = function
        self.options = {key: value for key, value in arguments.items() if key in own}
        parameters = inspect.signature(function).parameters
        self._takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        self._names = frozenset(parameters)

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[str | None],
        columns: Mapping[str, Sequence[object]],
    ) -> list[RewardResult]:
        """See `RewardFunction.score`."""
        offered = {**columns, "prompts": prompts, "responses": responses, "labels": labels}
        chosen = {
            key: list(values)
            for key, values in offered.items()
            if self._takes_all or key in self._names
        }
        try:
            found = checked_results(self._function(**chosen, **self.options), len(responses))
        except Exception as error:
            raise RewardError(f"reward function {self.name} failed: {error}") from error
        return [result_of(self.name, reward, components) for reward, components in found]

    def close(self) -> None:
        """Nothing is held."""


class UserReward:
    """A function `f(prompts=, responses=, labels=, **columns)` of a Python file.

    It returns one number or one dict of numbers per response. Of a dict, `reward` is the reward if
    present, else the sum; the other entries are components. Of `prompts`, `responses`, `labels`
    and the data's columns the function gets those it has a parameter for.

    The file is loaded and the signature checked here, before any model exists.

    Args:
        path: The file.
        function: Name of the function in it.
        timeout_seconds: Deadline of one call.
        arguments: Values of its keyword-only arguments; others of the names are left out.

    Raises:
        ConfigError: no such file or function.
        RewardError: the file cannot be imported, or the function cannot be called this way.
    """

    def __init__(
        self,
        path: str | Path,
        function: str,
        *,
        timeout_seconds: float = 120.0,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        file = Path(path).resolve()
        self.name = function
        self._spelling = f"{path}:{function}"
        if not file.is_file():
            raise ConfigError(f"reward function {self._spelling}: no file {file}")
        self._seconds = timeout_seconds
        self._given = arguments or {}
        self._worker = WorkerProcess(
            WorkerTask(
                "lightrft.rewards.user_task",
                "UserFunction",
                (str(file), function),
                shown_file=str(file),
            )
        )
        self._signature = self._load()

    @property
    def needs_labels(self) -> bool:
        """The function has a parameter `labels` without a default."""
        return "labels" in self._signature.required

    @property
    def options(self) -> dict[str, object]:
        """The values that were given for its keyword-only arguments."""
        own = self._signature.keyword_only
        return {name: value for name, value in self._given.items() if name in own}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a required parameter is no column of the data."""
        missing = sorted(
            self._signature.required - set(ARGUMENTS) - set(columns) - set(self.options)
        )
        if missing:
            listing = ", ".join(sorted(columns)) or "none"
            raise RewardError(
                f"reward function {self._spelling} needs the argument {missing[0]!r}, which is no "
                f"column of the data: the columns are {listing}; rename it or give it a default"
            )

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[str | None],
        columns: Mapping[str, Sequence[object]],
    ) -> list[RewardResult]:
        """See `RewardFunction.score`."""
        if not responses:
            return []
        self.check_columns(columns)
        request = self._arguments(prompts, responses, labels, columns)
        try:
            answer = self._worker.call(request, seconds=self._seconds)
        except WorkerTimeoutError as err:
            raise RewardError(
                f"reward function {self._spelling} did not return within {self._seconds:g} s for "
                f"{len(responses)} responses: make it faster or raise the reward timeout"
            ) from err
        except WorkerFailedError as err:
            raise self._error("failed", err) from err
        pairs = cast("list[tuple[float | None, dict[str, float]]]", answer)
        return [result_of(self.name, reward, components) for reward, components in pairs]

    def close(self) -> None:
        """Ends the worker process; may be called twice."""
        self._worker.close()

    def _load(self) -> Signature:
        try:
            parameters = cast("list[dict[str, object]]", self._worker.start())
        except WorkerFailedError as err:
            if err.kind == MissingFunctionError.__name__:
                raise ConfigError(f"reward function {self._spelling}: {err}") from err
            raise self._error("could not be loaded", err) from err
        by_keyword = [
            p for p in parameters if p["kind"] in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
        ]
        signature = Signature(
            names=frozenset(str(p["name"]) for p in by_keyword),
            required=frozenset(str(p["name"]) for p in by_keyword if p["is_required"]),
            takes_all=any(p["kind"] == "VAR_KEYWORD" for p in parameters),
            keyword_only=frozenset(
                str(p["name"]) for p in parameters if p["kind"] == "KEYWORD_ONLY"
            ),
        )
        positional = [
            str(p["name"])
            for p in parameters
            if p["kind"] == "POSITIONAL_ONLY" and p["is_required"]
        ]
        if positional or not (signature.takes_all or "responses" in signature.names):
            self.close()
            raise RewardError(
                f"reward function {self._spelling} must take the keyword argument responses, and "
                "may take prompts, labels and columns of the data: its parameters are "
                f"({', '.join(str(p['name']) for p in parameters)})"
            )
        return signature

    def _arguments(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[str | None],
        columns: Mapping[str, Sequence[object]],
    ) -> dict[str, object]:
        own = dict(zip(ARGUMENTS, (prompts, responses, labels), strict=True))
        offered: dict[str, Sequence[object]] = {**columns, **own}
        chosen = {
            name: list(values)
            for name, values in offered.items()
            if self._signature.takes_all or name in self._signature.names
        }
        return {**chosen, **self.options}

    def _error(self, what: str, err: WorkerFailedError) -> RewardError:
        details = f"\n{err.traceback}" if err.traceback else ""
        return RewardError(f"reward function {self._spelling} {what}: {err}{details}")


def result_of(name: str, reward: float | None, components: dict[str, float]) -> RewardResult:
    """What a function said of one response; without `reward` it is the sum of the components."""
    if reward is None:
        reward = sum(components.values())
    return RewardResult(reward, {name: reward, **components})
