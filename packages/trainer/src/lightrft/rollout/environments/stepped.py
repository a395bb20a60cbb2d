"""Coroutines of which each draws from global generators of its own, however they take turns."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import cast

from lightrft.rewards.user_task import seed_generators
from lightrft.rollout.environments.running import Running

# Reads and sets the state of a library's global generator.
_STATES = (("numpy.random", "get_state", "set_state"), ("torch", "get_rng_state", "set_rng_state"))
_stepping: ContextVar[Stepped] = ContextVar("stepping")
Draws = tuple[int, tuple[int, ...]]


class OperationClock:
    """The time that code of operations has run in this process, one after the other.

    Args:
        running: Says which of them does at the moment.
    """

    def __init__(self, running: Running) -> None:
        self.running = running
        self.seconds = 0.0
        self._pid = os.getpid()

    def leave_if_forked(self) -> None:
        """Ends the copy of this process that a tool made: only the worker itself may answer."""
        if os.getpid() != self._pid:
            os._exit(0)


class Operation:
    """An operation in progress.

    Args:
        number: Of the request.
        episode: Its own.
        seconds: It may take so long, without the time in which code of others ran.
        work: Of all.
    """

    def __init__(self, number: int, episode: str, seconds: float, work: OperationClock) -> None:
        self.number, self.episode, self.seconds, self.work = number, episode, seconds, work
        self.is_late = False
        self.task: asyncio.Task[object] | None = None
        self._begun, self._before, self._own = time.monotonic(), work.seconds, 0.0

    @property
    def seconds_left(self) -> float:
        """Until it is late."""
        of_others = self.work.seconds - self._before - self._own
        return self.seconds - (time.monotonic() - self._begun - of_others)

    def has_run(self, seconds: float) -> None:
        """Its code ran for so long."""
        self._own += seconds
        self.work.seconds += seconds


class Stepped(Coroutine[object, object, object]):
    """A coroutine of an operation, before each step of which the generators are put back.

    Args:
        inner: What the author wrote; the part up to the first `await` is the first step.
        operation: Whose it is.
        draws: What the draws follow from: a seed, then the number of the call and, in tasks that
            the author starts, the place of each in the one that started it.
    """

    def __init__(
        self, inner: Coroutine[object, object, object], operation: Operation, draws: Draws
    ) -> None:
        self._inner, self.operation, self._draws = inner, operation, draws
        self._num_tasks = 0
        self._states: dict[str, object] | None = None

    def send(self, value: object) -> object:
        """One step."""
        return self._step(self._inner.send, value)

    def throw(self, *error: object) -> object:
        """A step that begins with an exception."""
        return self._step(cast("Callable[..., object]", self._inner.throw), *error)

    def close(self) -> None:
        """Ends it without a further step."""
        self._inner.close()

    def __await__(self) -> Generator[object, object, object]:
        return (yield from self._inner.__await__())

    def _step(self, advance: Callable[..., object], *given: object) -> object:
        work = self.operation.work
        work.running.begin(self.operation.number)
        start = time.monotonic()
        _stepping.set(self)
        if self._states is None:
            seed, places = self._draws
            seed_generators(seed, places[0] if len(places) == 1 else places)
        else:
            _restore(self._states)
        try:
            found = advance(*given)
            self._states = _saved()
            return found
        except (SystemExit, KeyboardInterrupt) as error:
            # Of a task that the author started: the event loop would end with it.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            work.leave_if_forked()
            self.operation.has_run(time.monotonic() - start)
            work.running.end()

    def started(self, inner: Coroutine[object, object, object]) -> Stepped:
        """A task that its code starts."""
        self._num_tasks += 1
        seed, places = self._draws
        return Stepped(inner, self.operation, (seed, (*places, self._num_tasks)))


def stepping() -> Stepped | None:
    """The coroutine whose code, or whose callback, runs in the present context."""
    return _stepping.get(None)


def _saved() -> dict[str, object]:
    states: dict[str, object] = {"random": random.getstate()}
    for name, get, _ in _STATES:
        function = _function(name, get)
        if function is not None:
            states[name] = function()
    return states


def _restore(states: dict[str, object]) -> None:
    random.setstate(cast("tuple[object, ...]", states["random"]))
    for name, _, put in _STATES:
        function = _function(name, put)
        if function is not None and name in states:
            function(states[name])


def _function(module: str, name: str) -> Callable[..., object] | None:
    """A function of a module, if that has been imported, all of it."""
    found = sys.modules.get(module)
    return None if found is None else cast("Callable[..., object]", vars(found).get(name))
