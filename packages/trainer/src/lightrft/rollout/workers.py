"""Worker processes with many operations in flight, which are answered in any order."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar, cast

from lightrft.kernels.names import first_line
from lightrft.rewards.consumption import POLL_SECONDS
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rollout.running_call import Running

Result = TypeVar("Result")
_CHUNK = 1 << 16


class EpisodeError(RuntimeError):
    """An episode cannot go on: its environment failed, hung or died."""


class WorkerLostError(Exception):
    """The worker has ended; as far as we know, this operation did not cause it.

    Args:
        reason: Why it has ended.
        is_explained: Another operation is known to have ended it.
    """

    def __init__(self, reason: object, *, is_explained: bool) -> None:
        super().__init__(str(reason))
        self.is_explained = is_explained


@dataclass(frozen=True, slots=True)
class _Asked:
    """An operation in flight."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)
    answer: Future[object] = field(default_factory=Future)


class SharedWorker:
    """One worker from its start to its end, for any number of threads.

    The operations in it overlap, and its handler ends each at its deadline. The worker is killed
    if an operation's code runs longer than its limit without a break, or goes on after being
    cancelled. The operation that ends the worker gets the reason; the others get a
    WorkerLostError.

    Args:
        task: Task whose handler reads requests itself and answers each with its number.
        name: Name shown with what it prints.
        shown_seconds: Time in which its first lines are shown while no operation ends.
    """

    def __init__(
        self, task: WorkerTask, *, name: str = "", shown_seconds: float = math.inf
    ) -> None:
        self._shown_seconds = shown_seconds
        self._running = Running.create()
        self._process = WorkerProcess(task, name=name, inherited=(self._running.memory,))
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._last_number = 0
        self._has_ended = self._must_end = False
        self._wakes, self._wake = os.pipe()
        self._progress, self._since, self._grown = self._running.read(), 0.0, 0.0
        self._thread = threading.Thread(target=self._serve, name="shared worker", daemon=True)

    @property
    def is_running(self) -> bool:
        """True if the worker accepts operations."""
        return not self._has_ended

    def start(self) -> object:
        """Start the worker; return its description.

        Raises:
            WorkerFailedError: It cannot be set up.
        """
        try:
            described = self._process.start()
        except BaseException:
            self._has_ended = True
            self._give_back()
            raise
        self._thread.start()
        return described

    def send(self, request: object, *, seconds: float) -> Future[object]:
        """Send a request and return its answer to come.

        The answer raises a WorkerTimeoutError if it took too long (the message says what was
        done), a WorkerFailedError if the handler raised or the operation ended the worker, or a
        WorkerLostError if the worker has ended for another reason.

        Raises:
            WorkerLostError: The worker has ended before.
        """
        asked = _Asked(seconds)
        with self._lock:
            if self._has_ended:
                raise WorkerLostError("the worker has ended", is_explained=True)
            self._last_number += 1
            message = {"number": self._last_number, "seconds": seconds, "request": request}
            self._process.started.send(message)  # may refuse what cannot be pickled
            self._asked[self._last_number] = asked
            os.write(self._wake, b"\0")
        return asked.answer

    def abandon_start(self) -> None:
        """Kill a worker whose start has not ended; from another thread."""
        if not self._thread.is_alive():
            self._process.close()

    def close(self) -> None:
        """Kill the worker and its children, if it runs."""
        with self._lock:
            if self._has_ended:
                return
            self._must_end = True
            os.write(self._wake, b"\0")
        self._thread.join()

    def _serve(self) -> None:
        """Serve the worker until it ends; runs in a thread."""
        problem: Exception
        try:
            problem, guilty = self._follow()
        except Exception as error:  # noqa: BLE001 - code of environments may write anything
            text = f"its answers cannot be read: {type(error).__name__}: {first_line(error)}"
            problem, guilty = WorkerFailedError(text), self._running.read()[0]
        with self._lock:
            self._has_ended = True
            left, self._asked = self._asked, {}
        if len(left) == 1 and not self._must_end:
            (guilty,) = left
        self._process.close()
        self._give_back()
        for number, asked in left.items():
            lost = WorkerLostError(problem, is_explained=guilty in left)
            asked.answer.set_exception(problem if number == guilty else lost)

    def _follow(self) -> tuple[Exception, int | None]:
        """Send and receive until the worker must end; return why, and the guilty operation."""
        started, shown = self._process.started, time.monotonic()
        while not self._must_end:
            try:
                seconds = POLL_SECONDS if self._asked else None
                size = len(started.received)
                answers = started.exchange(seconds, wakes=self._wakes)
            except EOFError:
                return self._died()
            now = time.monotonic()
            if answers or now - shown > self._shown_seconds:
                started.end_call()
                shown = now
            if answers or len(started.received) != size:
                self._grown = now
            hung = self._take(answers)
            if hung is None:
                hung = self._stuck()
            if hung is not None:
                return WorkerTimeoutError("its worker was killed"), hung
            with self._lock:
                longest = max((each.seconds for each in self._asked.values()), default=math.inf)
            if started.received and now - self._grown > longest:
                raise ValueError("an answer was begun and not ended")
        return WorkerFailedError("it was closed"), None

    def _take(self, answers: list[bytes]) -> int | None:
        """Pass answers to those who wait; return the operation that hung, if any."""
        for body in answers:
            answer = cast("dict[str, object]", json.loads(body))
            number = int(cast("int", answer["number"]))
            if answer.get("late") == "hung":
                return number
            with self._lock:
                asked = self._asked.pop(number)
            _give(asked.answer, answer)
        return None

    def _stuck(self) -> int | None:
        """Return the operation whose code runs for too long; 0 if it is unknown."""
        progress, now = self._running.read(), time.monotonic()
        with self._lock:
            asked = dict(self._asked)
        if progress != self._progress or not asked:
            self._progress, self._since = progress, now
            return None
        running = asked.get(progress[0])
        limit = max(each.seconds for each in asked.values()) if running is None else running.seconds
        begun = min(each.begun for each in asked.values())
        if now - max(self._since, begun) <= limit:
            return None
        return 0 if running is None else progress[0]

    def _died(self) -> tuple[Exception, int | None]:
        text, is_memory = self._process.ending()
        # Waiting operations may hold more memory than the running one.
        return WorkerFailedError(text), None if is_memory else self._running.read()[0]

    def _give_back(self) -> None:
        self._running.close()
        os.close(self._wakes)
        os.close(self._wake)


def _give(waiting: Future[object], answer: dict[str, object]) -> None:
    if "late" in answer:
        waiting.set_exception(WorkerTimeoutError("it was cancelled"))
    elif "error" in answer:
        text, kind, shown = (str(answer[name]) for name in ("error", "kind", "traceback"))
        waiting.set_exception(WorkerFailedError(text, kind=kind, traceback=shown))
    else:
        waiting.set_result(answer["ok"])


class Workers:
    """Workers of one task, running one at a time; for any number of threads.

    Args:
        task: Task of the workers.
        name: Name shown with what they print.
        shown_seconds: See `SharedWorker`.
    """

    def __init__(
        self, task: WorkerTask, *, name: str = "", shown_seconds: float = math.inf
    ) -> None:
        self.task, self._name, self._shown_seconds = task, name, shown_seconds
        self.current: SharedWorker | None = None
        self._starting: SharedWorker | None = None
        self.described: object = None
        self._generation = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._turns = threading.Condition()
        self._num_busy = self._num_apart = 0
        self._is_apart = False

    def started(self) -> tuple[SharedWorker, int]:
        """Return the running worker, and how many there were including it."""
        with self._lock:
            if self._is_closed:
                raise EpisodeError("the workers have ended")
            if self.current is None or not self.current.is_running:
                worker = SharedWorker(self.task, name=self._name, shown_seconds=self._shown_seconds)
                self._starting = worker
                self.described = worker.start()
                self.current = worker
                self._generation += 1
            return self.current, self._generation

    def attempt(self, work: Callable[[], Result]) -> Result:
        """Return `work()`; restart it if another operation ended the worker.

        If the culprit is unknown, the operations in flight are repeated one at a time, so that a
        second end has a known culprit.
        """
        is_apart = False
        while True:
            try:
                with self._turn(is_apart=is_apart):
                    return work()
            except WorkerLostError as error:
                is_apart = not error.is_explained

    @contextlib.contextmanager
    def _turn(self, *, is_apart: bool) -> Iterator[None]:
        """Yield while others may run, too, or alone."""
        with self._turns:
            self._num_apart += is_apart
            self._turns.wait_for(
                lambda: (
                    not (self._is_apart or self._num_busy)
                    if is_apart
                    else not (self._is_apart or self._num_apart)
                )
            )
            self._num_busy += 1
            self._is_apart = is_apart
        try:
            yield
        finally:
            with self._turns:
                self._num_busy -= 1
                self._num_apart -= is_apart
                self._is_apart = False
                self._turns.notify_all()

    def close(self) -> None:
        """End the worker; no other is started."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.abandon_start()
        with self._lock:
            if self.current is not None:
                self.current.close()
