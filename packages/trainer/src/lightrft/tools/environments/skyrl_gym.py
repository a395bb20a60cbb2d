"""Environments of SkyRL-Gym: `init(prompt)`, then `step(action)` with each whole turn."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Protocol, cast

from lightrft.config import ConfigError
from lightrft.config.registry import load_reference
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.worker import Adapted, EpisodeLostError

Message = Mapping[str, object]


class TextEnvironment(Protocol):
    """Interface of SkyRL-Gym's classes."""

    def init(self, prompt: list[Message]) -> tuple[Sequence[Message], Mapping[str, object]]:
        """Return the prompt to ask, and further facts."""
        ...

    def step(self, action: str) -> Mapping[str, object]:
        """Return `observations` (messages), `reward` and `done` after a turn."""
        ...

    def close(self) -> None:
        """End the episode."""
        ...


class Settings(dict[str, object]):
    """Options that authors can read as items or as attributes."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"env_config has no {name!r}: give --environment_args {name}=..."
            ) from None


class TurnEnvironment(Adapted):
    """Episode of an environment that answers whole turns; the rewards of its turns add up.

    Args:
        make: Factory of the author's environment, from `env_config` and `extras`, the row.
        options: Value of `env_config`.
    """

    takes: ClassVar[tuple[str, ...]] = ("seed", "sample_seed", "max_turns")
    takes_options: ClassVar[bool] = True
    answers_turns: ClassVar[bool] = True

    def __init__(self, make: Callable[..., TextEnvironment], options: Mapping[str, object]) -> None:
        self._make, self._options = make, Settings(options)
        self._open = ExitStack()

    @property
    def author(self) -> object:
        """The author's environment."""
        return self._environment

    def reset(self, **row: object) -> object:
        """Begin with the prompt; return what `init` appends to its last message."""
        self._environment = self._make(env_config=self._options, extras=dict(row))
        self._open.callback(self._environment.close)
        prompt = list(cast("Sequence[Message]", row["prompt"]))
        asked, _ = self._environment.init(list(prompt))
        before, after = prompt[-1].get("content"), asked[-1].get("content") if asked else None
        added = _behind(before, after)
        if [*asked][:-1] != prompt[:-1] or added is None:
            raise ReportedError(
                "init must return the prompt, or add to the end of its last message: got "
                f"{str(asked)[:200]}"
            )
        return added or None

    def step(self, action: str) -> object:
        """Return observations, reward and end after a turn.

        Raises:
            EpisodeLostError: The author's `step` raised, its answer has another form, or it
                replaces the turn.
        """
        try:
            answer = self._environment.step(action)
        except Exception as error:
            raise EpisodeLostError(f"step raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, Mapping) or not {"observations", "reward", "done"} <= set(answer):
            raise EpisodeLostError(
                "step must return observations, reward and done: got " + str(answer)[:200]
            )
        if answer.get("postprocessed_action") not in (None, action):
            raise EpisodeLostError(
                f"step returned postprocessed_action {str(answer['postprocessed_action'])[:80]!r}: "
                "a turn is trained as it was sampled, and stays in the conversation as it is; "
                "leave it out"
            )
        self.paid = float(cast("float", answer["reward"]))
        self.is_done = bool(answer["done"])
        said = cast("Sequence[Message]", answer["observations"])
        contents = [message["content"] for message in said]
        if not any(isinstance(content, list) for content in contents):
            return "\n".join(map(str, contents))
        parts = [_as_parts(content) for content in contents]
        return [part for block in parts for part in ("\n", *block)][1:]

    def close(self) -> None:
        """End the author's environment."""
        self._open.close()


def _behind(before: object, after: object) -> str | list[object] | None:
    """Return what `after` adds to `before`; None if it does not begin with `before`."""
    if isinstance(before, str) and isinstance(after, str):
        return after[len(before) :] if after.startswith(before) else None
    start, more = _as_parts(before), _as_parts(after)
    return more[len(start) :] if more[: len(start)] == start else None


def _as_parts(content: object) -> list[object]:
    return list(content) if isinstance(content, list | tuple) else [content]


def _registered(name: str) -> tuple[object, dict[str, object]]:
    """Return an id's environment (import string or class), and its options."""
    try:
        registry = importlib.import_module("skyrl_gym.envs.registration").registry
    except ImportError as error:
        raise ReportedError(
            f"environment skyrl_gym:{name}: the ids are those of the package skyrl-gym, which is "
            f"missing ({error}): pip install skyrl-gym, or give FILE.py:NAME"
        ) from error
    if name not in registry:
        raise ReportedError(
            f"environment skyrl_gym:{name}: expected FILE.py:NAME, package.module:NAME, or one of "
            f"the ids {', '.join(sorted(registry))}"
        )
    return registry[name].entry_point, dict(registry[name].kwargs)


def converse(text: str) -> type[Adapted]:
    """Return the class of `FILE.py:NAME`, `package.module:NAME`, or an id of SkyRL-Gym.

    Raises:
        ReportedError: There is no such class, or it has no `init` and `step`.
    """
    entry, options = (text, {}) if ":" in text else _registered(text)
    try:
        author = load_reference(entry, kind="environment") if isinstance(entry, str) else entry
    except ConfigError as error:
        raise ReportedError(str(error)) from error
    if not isinstance(author, type) or not {"init", "step"} <= set(dir(author)):
        raise ReportedError(
            f"environment skyrl_gym:{text}: expected a class with init(prompt) and step(action)"
        )
    make = cast("Callable[..., TextEnvironment]", partial(author, **options))

    class Configured(TurnEnvironment):
        def __init__(self, options: Mapping[str, object] = MappingProxyType({})) -> None:
            super().__init__(make, options)

    Configured.__name__ = author.__name__
    return Configured
