"""Event loop of a worker, on which the operations of many episodes overlap.

An agent is one operation from its beginning to its end. Plain functions of environments run in turn
while the event loop is stopped, so they may start another one. Coroutines go on between them, and
each keeps its state of the global random generators.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import pickle
import random
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import BinaryIO, cast

from lightrft.rewards.user_task import seed_generators
from lightrft.rewards.worker import Failure, framed, take_frames, write_frame
from lightrft.rollout.running_call import Running

# Most threads of the executor that coroutines use.
_MAX_THREADS = 1024
_BEAT_SECONDS = 0.1
# Time for a late coroutine to end after it is cancelled.
GRACE_SECONDS = 5.0
_CHUNK = 1 << 16
Request = dict[str, object]
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
        seconds: Time limit.
        work: Clock of all operations.
        counts_others: True if the time in which code of other operations ran is part of it.
    """

    def __init__(
        self,
        number: int,
        episode: str,
        seconds: float,
        work: OperationClock,
        *,
        counts_others: bool = False,
    ) -> None:
        self.number, self.episode, self.seconds, self.work = number, episode, seconds, work
        self._counts_others = counts_others
        self.is_late = False
        self.task: asyncio.Task[object] | None = None
        self._begun, self._before, self._own = time.monotonic(), work.seconds, 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until it is late."""
        of_others = self.work.seconds - self._before - self._own
        of_others *= not self._counts_others
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
            the author starts, the index of each in the task that started it. None leaves the
            generators as they are.
    """

    def __init__(
        self, inner: Coroutine[object, object, object], operation: Operation, draws: Draws | None
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
        if self._states is not None:
            _restore(self._states)
        elif self._draws is not None:
            seed, places = self._draws
            seed_generators(seed, places[0] if len(places) == 1 else places)
        try:
            result = advance(*given)
            self._states = self._draws and _saved()
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
        draws = self._draws and (self._draws[0], (*self._draws[1], self._num_tasks))
        return Stepped(inner, self.operation, draws)


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


class OperationLoop:
    """Event loop that performs requests as they arrive, and answers each when it is done.

    Args:
        perform: Coroutine function for one operation on one episode.
        failure: Function that describes an exception.
        answers: Pipe to the trainer.
        running: Memory shared with the trainer.
        counts_others: See `Operation`.
    """

    def __init__(
        self,
        perform: Callable[[Request], Coroutine[object, object, object]],
        failure: Failure,
        *,
        answers: BinaryIO,
        running: Running,
        counts_others: bool = False,
    ) -> None:
        self._perform, self._failure, self.answers = perform, failure, answers
        self._work, self._counts_others = OperationClock(running), counts_others
        self._received = bytearray()
        self._waiting: deque[Request] = deque()
        self._operations: dict[int, Operation] = {}
        self._tasks: dict[str, set[asyncio.Task[object]]] = {}
        self._has_ended = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        self._loop.set_task_factory(self._task)  # type: ignore[arg-type]

    def run(self, requests: BinaryIO) -> None:
        """Serve requests until the trainer sends no more."""
        os.set_blocking(requests.fileno(), False)
        self._loop.add_reader(requests.fileno(), self._read, requests.fileno())
        self._beat()
        while not self._has_ended:
            self._loop.run_forever()
            if self._waiting:
                self._begin(self._waiting.popleft())
            if self._waiting:  # coroutines get a turn in between
                self._loop.call_soon(self._loop.stop)

    def _read(self, pipe: int) -> None:
        chunk = os.read(pipe, _CHUNK)
        self._has_ended = not chunk
        self._received += chunk
        self._waiting.extend(map(pickle.loads, take_frames(self._received)))
        if self._waiting or self._has_ended:
            self._loop.stop()

    def _beat(self) -> None:
        self._work.running.beat()
        self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _begin(self, sent: Request) -> None:
        """Run an operation up to where it must wait; the rest is a task."""
        request = cast("Request", sent["request"])
        number, seconds = cast("tuple[int, float]", (sent["number"], sent["seconds"]))
        operation = Operation(
            number,
            str(request["episode"]),
            seconds,
            self._work,
            counts_others=self._counts_others,
        )
        self._operations[number] = operation
        if request["operation"] == "close":
            for left in self._tasks.pop(operation.episode, ()):
                left.cancel()
        seed_of_call = cast("tuple[int, int] | None", request.get("draws"))
        draws = seed_of_call and (seed_of_call[0], (seed_of_call[1],))
        stepped = Stepped(self._performed(operation, request), operation, draws)
        context = contextvars.copy_context()
        try:
            context.run(stepped.send, None)
        except StopIteration:
            return
        operation.task = self._loop.create_task(stepped, context=context)
        self._check(operation)

    async def _performed(self, operation: Operation, request: Request) -> None:
        try:
            answer = {"ok": await self._perform(request)}
        except BaseException as error:  # noqa: BLE001 - SystemExit of user code included
            answer = self._failure(error)
        self._answer(operation, {"late": "cancelled"} if operation.is_late else answer)

    def _answer(self, operation: Operation, answer: Mapping[str, object]) -> None:
        self._work.leave_if_forked()
        if self._operations.pop(operation.number, None) is None:
            return
        try:
            frame = framed({"number": operation.number, **answer})
        except (TypeError, ValueError, RecursionError) as error:
            frame = framed({"number": operation.number, **self._failure(error)})
        write_frame(self.answers, frame)

    def _check(self, operation: Operation) -> None:
        """Cancel an operation that is late; if it does not end, it has hung."""
        if operation.number not in self._operations:
            return
        if operation.is_late:
            self._answer(operation, {"late": "hung"})
            return
        left = operation.seconds_left
        if left <= 0 and operation.task is not None:
            operation.is_late, left = True, GRACE_SECONDS
            operation.task.cancel()
        self._loop.call_later(left, self._check, operation)

    def _task(
        self,
        loop: asyncio.AbstractEventLoop,
        inner: Coroutine[object, object, object],
        **options: object,
    ) -> asyncio.Task[object]:
        """Create a task; if an operation starts it, the task belongs to the operation."""
        made = cast("Callable[..., asyncio.Task[object]]", asyncio.Task)
        starter = None if isinstance(inner, Stepped) else _stepping.get(None)
        if starter is None:
            return made(inner, loop=loop, **options)
        task = made(starter.started(inner), loop=loop, **options)
        # It may outlive the operation, but not the episode.
        tasks = self._tasks.setdefault(starter.operation.episode, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task


class HostedEpisodes(ABC):
    """Handler of a worker that performs operations of many episodes on one event loop.

    Attributes:
        counts_others: See `Operation`.
    """

    counts_others = False

    @abstractmethod
    async def perform(self, request: Request) -> object:
        """Perform one operation on one episode."""

    def describe(self) -> object:
        """Return nothing; a successful start is the whole answer."""
        return None

    def serve(
        self,
        requests: BinaryIO,
        answers: BinaryIO,
        *,
        failure: Failure,
        inherited: tuple[int, ...],
    ) -> None:
        """Serve all operations that the trainer requests."""
        running = Running(*inherited)
        OperationLoop(
            self.perform,
            failure,
            answers=answers,
            running=running,
            counts_others=self.counts_others,
        ).run(requests)


class _OnTheLoop:
    """Awaitable that continues on the event loop."""

    def __await__(self) -> Generator[None]:
        yield


async def settled(result: object) -> object:
    """Return a value, or the result of awaiting it on the event loop."""
    if not inspect.isawaitable(result):
        return result
    await _OnTheLoop()
    return await result
