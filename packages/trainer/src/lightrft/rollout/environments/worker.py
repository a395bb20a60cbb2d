"""Environments and tools in a worker process that hosts many episodes at once.

The author's interface is TRL's: a class with `reset(**row)`, further public methods as tools, and
optionally `get_reward()`; a function that makes one; or a dict of them, where each row names one.
Adapters support other interfaces. Runs in the worker; imports the standard library, NumPy for
images, and transformers once for the schemas.
"""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import ClassVar, cast

from lightrft.config.registry import ENVIRONMENT_KINDS, split_kind
from lightrft.rewards.environment_snapshot import keep_attributes
from lightrft.rewards.user_task import finite_number
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.calls import ENVIRONMENT_COLUMN
from lightrft.rollout.environments.content import (
    ContentError,
    Parts,
    as_parts,
    has_image,
    named,
    to_json,
)
from lightrft.rollout.operation_loop import HostedEpisodes, Request, settled
from lightrft.rollout.user_code import load_user_code, total_and_parts

NOT_TOOLS = ("reset", "get_reward", "get_call_reward")
# Address in the text of an object, which differs in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Tool = Callable[..., object]
Factory = Callable[[], object]


class EpisodeLostError(ReportedError):
    """The state of an episode is lost; later answers do not count."""


class EnvironmentFullError(ReportedError):
    """The environment takes no further episode until another one has ended."""


class Adapted(ABC):
    """One episode of an environment with another interface.

    Attributes:
        takes: Arguments of `reset` in addition to the row; see `EnvironmentSpec`.
        takes_options: The constructor takes a mapping of options.
        answers_turns: `step(action)` takes a whole turn and answers as a user does; otherwise
            `step` is a tool that the model calls.
        is_done: The episode has ended; its last answer is not shown.
        paid: Rewards of steps that no answer has carried yet.
    """

    takes: ClassVar[tuple[str, ...]] = ("seed",)
    takes_options: ClassVar[bool] = False
    answers_turns: ClassVar[bool] = False
    is_done = False
    paid = 0.0

    @property
    def author(self) -> object:
        """The object with the attributes that reward functions read."""
        return self

    @abstractmethod
    def reset(self, **row: object) -> object:
        """Begin the episode; the result is appended to the user's message."""

    def get_reward(self) -> float:
        """Return the reward at the end, beyond those of its answers."""
        return self.paid

    def get_call_reward(self) -> float:
        """Return the rewards of steps since the last time."""
        rewards, self.paid = self.paid, 0.0
        return rewards

    @abstractmethod
    def close(self) -> None:
        """End the episode, wherever it is."""

    @classmethod
    def schemas(cls) -> list[object]:
        """Return the schemas of its tools, as chat templates take them."""
        return []


class HostedEnvironments(HostedEpisodes):
    """Handler of a worker: resets, calls, rewards.

    Args:
        environment: Import string of a class, of a function that makes an environment, or of a
            dict of these by name; None for stateless tools alone.
        tools: Import strings of functions.
        max_characters: Longest answer that is sent; a longer one is cut, and says so.
        reads_images: The model reads images, so answers may have some.
        options: Arguments of the environment's class.
        takes_attribute: A class without `get_reward` pays by its attribute `reward`; false where
            a reward function may read that attribute.
        describes: `describe` returns specifications; only one worker needs to.
    """

    def __init__(
        self,
        environment: str | None,
        tools: Sequence[str],
        max_characters: int,
        reads_images: bool = False,
        options: Mapping[str, object] = MappingProxyType({}),
        takes_attribute: bool = False,
        describes: bool = True,
    ) -> None:
        import numpy.random  # noqa: F401 - seeding covers only modules that are imported before

        self._reads_images = reads_images
        self._describes = describes
        self._max_characters = max_characters
        self._factories = {} if environment is None else _factories(environment, options)
        self._takes_attribute = takes_attribute
        self._tools: dict[str, Tool] = {}
        for text in tools:
            tool = load_user_code(text, "tool")
            if not inspect.isroutine(tool):
                raise ReportedError(f"tool {text} is no function: got {type(tool).__name__}")
            self._tools[tool.__name__] = cast("Tool", tool)
        self._episodes: dict[str, object] = {}

    def describe(self) -> object:
        """Return schemas and facts of the class for each environment, by name."""
        if not self._describes:
            return None
        kinds: Mapping[str, Factory | None] = self._factories or {"": None}
        return {name: self._described(name, make) for name, make in kinds.items()}

    def _described(self, name: str, make: Factory | None) -> object:
        instance = None if make is None else make()
        cls = type(instance)
        reset = getattr(cls, "reset", None)
        if make is not None and not inspect.isfunction(reset):
            raise ReportedError(_not_a_class(f"{name or 'environment'}: class {cls.__name__}"))
        adapted = cls if issubclass(cls, Adapted) else None
        return {
            "name": None if make is None else cls.__name__,
            "schemas": self._schemas(instance, adapted),
            "has_reward": not {"get_reward", "get_call_reward"}.isdisjoint(dir(cls))
            or (self._takes_attribute and _keeps_reward(cls)),
            "takes": _takes(reset) if adapted is None else adapted.takes,
            "answers_turns": adapted is not None and adapted.answers_turns,
            "stateless": sorted(self._tools),
            "waits": self._waits(cls),
        }

    def _waits(self, cls: type[object]) -> bool:
        """Return whether operations are coroutines, which may overlap."""
        methods = [getattr(cls, name, None) for name in (*NOT_TOOLS, *tool_names(cls))]
        return any(map(inspect.iscoroutinefunction, (*methods, *self._tools.values())))

    def _schemas(self, instance: object, own: type[Adapted] | None) -> list[object]:
        methods = {name: getattr(instance, name) for name in tool_names(type(instance))}
        shown = [] if own is None else own.schemas()
        functions = cast("list[dict[str, dict[str, str]]]", shown)
        names = [each["function"]["name"] for each in functions] or list(methods)
        twice = sorted({each for each in names if names.count(each) > 1 or each in self._tools})
        if twice:
            raise ReportedError(f"tools must differ: {twice[0]!r} is one twice, or a function, too")
        if own is None:
            return [_schema(name, tool) for name, tool in {**methods, **self._tools}.items()]
        if own.answers_turns and self._tools:
            raise ReportedError(f"{own.__name__} answers whole turns: it takes no tools beside it")
        return [*shown, *(_schema(name, tool) for name, tool in self._tools.items())]

    async def perform(self, request: Request) -> object:
        """Perform one operation on one episode."""
        operation, episode = str(request["operation"]), str(request["episode"])
        if operation == "reset":
            return await self._reset(episode, cast("dict[str, object]", request["row"]))
        if operation == "call":
            arguments = cast("dict[str, object]", request["arguments"])
            return await self._call(episode, str(request["name"]), arguments)
        if operation == "reward":
            return await self._reward(episode)
        if operation == "keep":
            return self._keep(episode)
        self._end(episode)
        return None

    def _end(self, episode: str) -> None:
        ended = self._episodes.pop(episode, None)
        if isinstance(ended, Adapted):
            ended.close()

    async def _reset(self, episode: str, row: dict[str, object]) -> object:
        if not self._factories:
            return None
        # As in TRL, the environment does not receive the column that chose it.
        kind = "" if "" in self._factories else str(row.pop(ENVIRONMENT_COLUMN))
        with suppress(Exception):  # left by a restart or an abandoned step
            self._end(episode)
        environment = self._factories[kind]()
        self._episodes[episode] = environment
        message = await settled(environment.reset(**row))  # type: ignore[attr-defined]
        name = f"{type(environment).__name__}.reset"
        if message is None or isinstance(message, str):
            return message
        parts = self._parts(message, name)
        return _answer(parts) if has_image(message) else "".join(map(str, parts))

    async def _call(
        self, episode: str, name: str, arguments: dict[str, object]
    ) -> dict[str, object]:
        tool = self._tools.get(name)
        try:
            if tool is None:
                tool = cast("Tool", getattr(self._episodes[episode], name))
            result = await settled(tool(**arguments))
            answer: dict[str, object] = {}
            if has_image(result):
                parts = self._parts(result, name)
                cut = (self._cut(as_text(p)) if isinstance(p, str) else p for p in parts)
                answer |= _answer(tuple(cut))
            else:
                answer["text"] = self._cut(as_text(result))
        except EpisodeLostError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - sent to the model
            text = self._cut(f"{type(error).__name__}: {error}")
            answer = {"text": as_text({"error": text}), "error": type(error).__name__}
        environment = self._episodes.get(episode)
        if isinstance(environment, Adapted) and environment.is_done:
            answer["ends_episode"] = "yes"
        if name not in self._tools and hasattr(environment, "get_call_reward"):
            paid = finite_number("get_call_reward", await settled(environment.get_call_reward()))
            return {**answer, "reward": paid}
        return answer

    async def _reward(self, episode: str) -> list[object] | None:
        environment = self._episodes.get(episode)
        if environment is None:
            return None
        if hasattr(environment, "get_reward"):
            reward = await settled(environment.get_reward())
        elif hasattr(environment, "get_call_reward"):
            reward = 0.0
        else:
            reward = getattr(environment, "reward", None)
        if reward is None:
            return None
        return total_and_parts(reward, whole="get_reward", part="get_reward, {}")

    def _keep(self, episode: str) -> list[object]:
        """Return the name of the class, and its public attributes."""
        environment = self._episodes.get(episode)
        if isinstance(environment, Adapted):
            environment = environment.author
        return [type(environment).__name__, keep_attributes(environment)]

    def _parts(self, result: object, name: str) -> Parts:
        """Return texts and images of an answer.

        Raises:
            EpisodeLostError: The model reads text only, or a block is neither text nor a readable
                image.
        """
        if has_image(result) and not self._reads_images:
            raise EpisodeLostError(
                f"{name} answered with an image, and the model reads text only: train a "
                "vision-language model, or answer in text"
            )
        try:
            return as_parts(result)
        except ContentError as error:
            raise EpisodeLostError(f"{name}: {error}") from error

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        return f"{text[: self._max_characters]}\n[cut: {len(text)} characters in all]"


def tool_names(cls: type[object]) -> list[str]:
    """Return the public functions of a class except those of `NOT_TOOLS`, sorted."""
    return [
        name
        for name, _ in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]


def as_text(result: object) -> str:
    """Convert a result to text: strings unchanged, all else as JSON, without objects' addresses."""
    text = (
        result
        if isinstance(result, str)
        else json.dumps(
            result, ensure_ascii=False, default=lambda each: _ADDRESS.sub("", str(each))
        )
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs


def _keeps_reward(cls: type[object]) -> bool:
    """Return whether methods use an attribute `reward` that is not a method itself."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    is_named = any("reward" in method.__code__.co_names for _, method in methods)
    return is_named and not callable(getattr(cls, "reward", None))


def _takes(reset: Callable[..., object] | None) -> list[str]:
    known = () if reset is None else inspect.signature(reset).parameters
    return [name for name in ("seed", "sample_seed") if name in known]


def _answer(parts: Parts) -> dict[str, object]:
    return {"text": named(parts), "content": to_json(parts)}


def _factories(text: str, options: Mapping[str, object]) -> dict[str, Factory]:
    """Return factories of environments by their names in rows; "" where there is only one."""
    kind, rest = split_kind(text)
    if kind is not None:
        adapt = cast("Callable[[str], type[Adapted]]", ENVIRONMENT_KINDS.load(kind))
        adapted = adapt(rest)
        if options and not adapted.takes_options:
            raise ReportedError(f"environment {text} takes no environment_args: leave them out")
        build = cast("Callable[..., object]", adapted)
        return {"": partial(build, options) if options else build}
    loaded = load_user_code(text, "environment")
    named = loaded if isinstance(loaded, Mapping) and loaded else {"": loaded}
    for name, make in named.items():
        is_named = isinstance(name, str) and bool(name) == (named is loaded)
        if not callable(make) or not is_named:
            raise ReportedError(_not_a_class(f"environment {text} {name}".rstrip()))
    makers = cast("Mapping[str, Callable[..., object]]", named)
    return {name: partial(make, **options) if options else make for name, make in makers.items()}


def _not_a_class(what: str) -> str:
    return (
        f"{what}: expected a class with reset(**row), further public methods as tools, and "
        "optionally get_reward(); a function that makes one, or a dict of such by name"
    )


def _schema(name: str, tool: Tool) -> object:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # several types, all about the author's signature or docstring
        raise ReportedError(
            f"tool {name} needs type hints and a Google docstring that describes each argument: "
            f"{error}"
        ) from error
