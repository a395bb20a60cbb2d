"""Coroutines that overlap, where each keeps its state of the global random generators."""

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
from lightrft.rollout.running_call import Running

# Functions that get and set the state of a library's global generator.
_STATES = (("numpy.random", "get_state", "set_state"), ("torch", "get_rng_state", "set_rng_state"))
_stepping: ContextVar[Stepped] = ContextVar("stepping")
Draws = tuple[int, tuple[int, ...]]


class OperationClock:
    """Total time that the code of operations has run in this process.

    Args:
        running: Record of the operation that runs at the moment.
    """

    def __init__(self, running: Running) -> None:
        self.running = running
        self.seconds = 0.0
        self._pid = os.getpid()

    def leave_if_forked(self) -> None:
        """Exit if a tool forked this process: only the worker itself may answer."""
        if os.getpid() != self._pid:
            os._exit(0)


class Operation:
    """An operation in progress.

    Args:
        number: Number of the request.
        episode: Key of its episode.
        seconds: Time limit, without the time in which code of other operations ran.
        work: Clock of all operations.
    """

    def __init__(self, number: int, episode: str, seconds: float, work: OperationClock) -> None:
        self.number, self.episode, self.seconds, self.work = number, episode, seconds, work
        self.is_late = False
        self.task: asyncio.Task[object] | None = None
        self._begun, self._before, self._own = time.monotonic(), work.seconds, 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until it is late."""
        of_others = self.work.seconds - self._before - self._own
        return self.seconds - (time.monotonic() - self._begun - of_others)

    def has_run(self, seconds: float) -> None:
        """Record that its code ran for `seconds`."""
        self._own += seconds
        self.work.seconds += seconds


class Stepped(Coroutine[object, object, object]):
    """A coroutine of an operation that restores its generators before each step.

    Args:
        inner: The author's coroutine; its part up to the first `await` is the first step.
        operation: Operation that it belongs to.
        draws: Source of random numbers: a seed, then the number of the call and, in tasks that
            the author starts, the index of each in the task that started it.
    """

    def __init__(
        self, inner: Coroutine[object, object, object], operation: Operation, draws: Draws
    ) -> None:
        self._inner, self.operation, self._draws = inner, operation, draws
        self._num_tasks = 0
        self._states: dict[str, object] | None = None

    def send(self, value: object) -> object:
        """Run one step."""
        return self._step(self._inner.send, value)

    def throw(self, *error: object) -> object:
        """Run a step that begins with an exception."""
        return self._step(cast("Callable[..., object]", self._inner.throw), *error)

    def close(self) -> None:
        """End it without a further step."""
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
            result = advance(*given)
            self._states = _saved()
            return result
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised in a task that the author started, it would end the event loop.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            work.leave_if_forked()
            self.operation.has_run(time.monotonic() - start)
            work.running.end()

    def started(self, inner: Coroutine[object, object, object]) -> Stepped:
        """Wrap a task that its code starts."""
        self._num_tasks += 1
        seed, places = self._draws
        return Stepped(inner, self.operation, (seed, (*places, self._num_tasks)))


def stepping() -> Stepped | None:
    """Return the coroutine whose code, or callback, runs in the current context."""
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
    """Return a function of a module, if that is completely imported."""
    loaded = sys.modules.get(module)
    return None if loaded is None else cast("Callable[..., object]", vars(loaded).get(name))
