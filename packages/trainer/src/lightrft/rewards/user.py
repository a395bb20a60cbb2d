"""Reward functions of a user's Python file, run in a process that can be killed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.rewards.errors import RewardError
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.types import RewardResult
from lightrft.rewards.user_task import MissingFunctionError
from lightrft.strategy.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

ARGUMENTS = ("prompts", "responses", "labels")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a user's function can be called with.

    Args:
        names: Parameters that can be given by keyword.
        required: Those without a default.
        takes_all: It has `**keywords`.
    """

    names: frozenset[str]
    required: frozenset[str]
    takes_all: bool


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

    Raises:
        ConfigError: no such file or function.
        RewardError: the file cannot be imported, or the function cannot be called this way.
    """

    def __init__(self, path: str | Path, function: str, *, timeout_seconds: float = 120.0) -> None:
        file = Path(path).resolve()
        self.name = function
        self._spelling = f"{path}:{function}"
        if not file.is_file():
            raise ConfigError(f"reward function {self._spelling}: no file {file}")
        self._seconds = timeout_seconds
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

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise a RewardError if a required parameter is no column of the data."""
        missing = sorted(self._signature.required - set(ARGUMENTS) - set(columns))
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
        return [self._result(reward, components) for reward, components in pairs]

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
    ) -> dict[str, list[object]]:
        own = dict(zip(ARGUMENTS, (prompts, responses, labels), strict=True))
        offered: dict[str, Sequence[object]] = {**columns, **own}
        return {
            name: list(values)
            for name, values in offered.items()
            if self._signature.takes_all or name in self._signature.names
        }

    def _error(self, what: str, err: WorkerFailedError) -> RewardError:
        details = f"\n{err.traceback}" if err.traceback else ""
        return RewardError(f"reward function {self._spelling} {what}: {err}{details}")

    def _result(self, reward: float | None, components: dict[str, float]) -> RewardResult:
        if reward is None:
            reward = sum(components.values())
        return RewardResult(reward, {self.name: reward, **components})
