"""Environments and tools as they live in a worker process: many episodes, one call at a time.

The author's interface is TRL's: a class with `reset(**row) -> str | None`, further public methods
as tools, and optionally `get_reward()`; other makes come through adapters. Runs in the worker;
imports the standard library, and transformers once for the schemas.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from lightrft.config import ConfigError
from lightrft.config.registry import ENVIRONMENT_KINDS, load_reference, split_kind, split_reference
from lightrft.experience.environments.adapted import Adapted, EpisodeLostError
from lightrft.rewards.worker import ReportedError

NOT_TOOLS = ("reset", "get_reward")
Tool = Callable[..., object]


class HostedEnvironments:
    """The handler of a worker: resets, calls, rewards.

    Args:
        environment: Import string of a class, or None for stateless tools alone.
        tools: Import strings of functions.
        max_characters: Longest answer that is sent; the rest is cut, and said to be.
        describes: Say what there is; one worker of several does.
    """

    def __init__(
        self, environment: str | None, tools: Sequence[str], max_characters: int, describes: bool
    ) -> None:
        self._pid = os.getpid()
        self._describes = describes
        self._max_characters = max_characters
        self._class = None if environment is None else _environment_class(environment)
        self._tools: dict[str, Tool] = {}
        for text in tools:
            tool = _load(text, "tool")
            if not inspect.isroutine(tool):
                raise ReportedError(f"tool {text} is no function: got {type(tool).__name__}")
            self._tools[tool.__name__] = cast("Tool", tool)
        self._episodes: dict[str, object] = {}

    def describe(self) -> object:
        """Name, schemas of the tools, and what the class has."""
        if not self._describes:
            return None
        methods: dict[str, Tool] = {}
        if self._class is not None:
            instance = self._class()
            methods = {name: getattr(instance, name) for name in tool_names(self._class)}
        twice = sorted(set(methods) & set(self._tools))
        if twice:
            raise ReportedError(f"tools must differ: {twice[0]!r} is a method and a function")
        reset = () if self._class is None else inspect.signature(self._class.reset).parameters
        return {
            "name": None if self._class is None else self._class.__name__,
            "schemas": self._schemas(methods),
            "has_reward": self._class is not None and hasattr(self._class, "get_reward"),
            "takes_seed": "seed" in reset,
            "answers_turns": self._answers_turns(),
            "stateless": sorted(self._tools),
        }

    def _schemas(self, methods: Mapping[str, Tool]) -> list[object]:
        own = _adapted(self._class)
        shown = {} if own else methods
        found: list[object] = [] if own is None else own.schemas()
        return [*found, *(_schema(n, tool) for n, tool in {**shown, **self._tools}.items())]

    def _answers_turns(self) -> bool:
        own = _adapted(self._class)
        if own is None or not own.answers_turns:
            return False
        if self._tools:
            raise ReportedError(f"{own.__name__} answers whole turns: it takes no tools beside it")
        return True

    def __call__(self, request: object) -> object:
        """One operation on one episode."""
        asked = cast("dict[str, object]", request)
        operation, episode = str(asked["operation"]), str(asked["episode"])
        if operation == "reset":
            return self._reset(episode, cast("dict[str, object]", asked["row"]))
        if operation == "call":
            return self._call(
                episode, str(asked["name"]), cast("dict[str, object]", asked["arguments"])
            )
        if operation == "reward":
            return self._reward(episode)
        self._episodes.pop(episode, None)
        return None

    def _reset(self, episode: str, row: dict[str, object]) -> str | None:
        if self._class is None:
            return None
        environment = self._class()
        self._episodes[episode] = environment
        told = environment.reset(**row)
        if inspect.isawaitable(told):
            told = asyncio.run(_wait(told))
        if told is not None and not isinstance(told, str):
            raise ReportedError(
                f"{self._class.__name__}.reset must return a string or None: got "
                f"{type(told).__name__} (media in observations are not supported)"
            )
        return told

    def _call(self, episode: str, name: str, arguments: dict[str, object]) -> dict[str, str]:
        tool = self._tools.get(name)
        try:
            if tool is None:
                tool = cast("Tool", getattr(self._episodes[episode], name))
            result = tool(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
            answer = {"text": self._cut(as_text(result))}
            environment = self._episodes.get(episode)
            if isinstance(environment, Adapted) and environment.is_done:
                answer["ends_episode"] = "yes"
        except EpisodeLostError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the model
            text = self._cut(f"{type(error).__name__}: {error}")
            answer = {"text": as_text({"error": text}), "error": type(error).__name__}
        if os.getpid() != self._pid:
            os._exit(0)  # a tool forked: only the worker itself may answer
        return answer

    def _reward(self, episode: str) -> list[object] | None:
        environment = self._episodes.get(episode)
        if environment is None or not hasattr(environment, "get_reward"):
            return None
        reward = environment.get_reward()
        if inspect.isawaitable(reward):
            reward = asyncio.run(_wait(reward))
        if reward is None:
            return None
        if isinstance(reward, Mapping):
            parts = {str(name): _number(value) for name, value in reward.items()}
            total = parts.pop("reward", None)
            return [sum(parts.values()) if total is None else total, parts]
        return [_number(reward), {}]

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        return f"{text[: self._max_characters]}\n[cut: {len(text)} characters in all]"


def tool_names(cls: type[object]) -> list[str]:
    """Public functions of a class but `reset` and `get_reward`, sorted."""
    return [
        name
        for name, _ in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


def as_text(result: object) -> str:
    """A result as text: strings as they are, all else as JSON."""
    text = (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs


async def _wait(awaitable: object) -> object:
    return await awaitable  # type: ignore[misc]


def _number(value: object) -> float:
    number = float(cast("float", value))
    if not math.isfinite(number):
        raise ReportedError(f"get_reward must return finite numbers: got {value!r}")
    return number


def _load(text: str, kind: str) -> object:
    place = (split_reference(text) or ("", ""))[0]
    if place.endswith(".py"):
        # The user's imports from beside the file work, as if it were run as a script.
        sys.path.insert(0, str(Path(place).resolve().parent))
    try:
        return load_reference(text, kind=kind)
    except ConfigError as error:
        raise ReportedError(str(error)) from error


def _adapted(cls: type[object] | None) -> type[Adapted] | None:
    return cls if cls is not None and issubclass(cls, Adapted) else None


def _environment_class(text: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - any class
    kind, rest = split_kind(text)
    if kind is not None:
        adapt = cast("Callable[[str], object]", ENVIRONMENT_KINDS.load(kind))
        return adapt(rest)
    found = _load(text, "environment")
    if not inspect.isclass(found) or not inspect.isfunction(getattr(found, "reset", None)):
        raise ReportedError(
            f"environment {text}: expected a class with reset(**row), further public methods as "
            "tools, and optionally get_reward()"
        )
    return found


def _schema(name: str, tool: Tool) -> object:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # several types, all about the author's signature or docstring
        raise ReportedError(
            f"tool {name} needs type hints and a Google docstring that describes each argument: "
            f"{error}"
        ) from error
