"""A worker process with many operations in flight, answered in any order."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from lightrft.kernels.names import first_line
from lightrft.rewards.consumption import POLL_SECONDS
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.worker import FRAME
from lightrft.rollout.environments.running import Running

_CHUNK = 1 << 16


class WorkerLostError(Exception):
    """The worker has ended; as far as we know, this operation did not cause it.

    Args:
        is_explained: Another operation is known to have ended it.
    """

    def __init__(self, *, is_explained: bool) -> None:
        super().__init__("the worker ended while an operation was in flight")
        self.is_explained = is_explained


@dataclass(frozen=True, slots=True)
class _Asked:
    """An operation in flight."""

    seconds: float
    answer: Future[object] = field(default_factory=Future)


class SharedWorker:
    """One worker from its start to its end, for any number of threads.

    Coroutines in it overlap, and each is cancelled at its deadline. The worker is killed if an
    operation's code runs longer than its limit without a break, or goes on after being cancelled.
    The operation that ends the worker gets the reason; the others get a WorkerLostError.

    Args:
        task: Task whose handler reads requests itself, by an `OperationLoop`.
    """

    def __init__(self, task: WorkerTask) -> None:
        self._running = Running.create()
        self._process = WorkerProcess(task, inherited=(self._running.memory,))
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._unsent = bytearray()
        self._last_number = 0
        self._has_ended = self._must_end = False
        self._wakes, self._wake = os.pipe()
        self._progress, self._since, self._grown = self._running.read(), 0.0, 0.0
        self._thread = threading.Thread(target=self._serve, name="environment worker", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether it accepts operations."""
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

    def ask(self, request: object, *, seconds: float) -> object:
        """Send a request, wait, and return the answer.

        Raises:
            WorkerTimeoutError: It took too long; the message says what was done.
            WorkerFailedError: The handler raised, or the operation ended the worker.
            WorkerLostError: The worker has ended for another reason.
        """
        asked = _Asked(seconds)
        with self._lock:
            if self._has_ended:
                raise WorkerLostError(is_explained=True)
            self._last_number += 1
            sent = {"number": self._last_number, "seconds": seconds, "request": request}
            body = pickle.dumps(sent)
            if not self._asked:
                self._since = time.monotonic()
            self._asked[self._last_number] = asked
            self._unsent += FRAME.pack(len(body)) + body
            os.write(self._wake, b"\0")
        return asked.answer.result()

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
            lost = WorkerLostError(is_explained=guilty in left)
            asked.answer.set_exception(problem if number == guilty else lost)

    def _follow(self) -> tuple[Exception, int | None]:
        """Send and receive until the worker must end; return why, and the guilty operation."""
        started, received = self._process.started, bytearray()
        requests, answers, printed = started.pipes()
        with selectors.DefaultSelector() as selector:
            for pipe in (answers, printed, self._wakes):
                selector.register(pipe, selectors.EVENT_READ)
            while True:
                if self._must_end:
                    return WorkerFailedError("it was closed"), None
                self._set_writes(selector, requests)
                ready = selector.select(POLL_SECONDS if self._asked else None)
                for key, _ in ready:
                    if key.fd == requests:
                        self._send(requests)
                        continue
                    chunk = os.read(key.fd, _CHUNK)
                    if key.fd == printed and chunk:
                        started.output.feed(chunk)
                    elif key.fd == printed:
                        selector.unregister(printed)
                    elif key.fd == answers and not chunk:
                        return self._died()
                    elif key.fd == answers:
                        received += chunk
                        self._grown = time.monotonic()
                hung = self._take(received)
                if hung is None:
                    hung = self._stuck()
                if hung is not None:
                    return WorkerTimeoutError("its worker was killed"), hung

    def _set_writes(self, selector: selectors.BaseSelector, requests: int) -> None:
        """Listen for room in the pipe as long as there is something to send."""
        is_set = requests in selector.get_map()
        if self._unsent and not is_set:
            selector.register(requests, selectors.EVENT_WRITE)
        elif is_set and not self._unsent:
            selector.unregister(requests)

    def _send(self, requests: int) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            try:
                del self._unsent[: os.write(requests, self._unsent[:_CHUNK])]
            except BrokenPipeError:
                self._unsent.clear()  # the end of the answers explains it

    def _take(self, received: bytearray) -> int | None:
        """Pass complete answers to those who wait; return the operation that hung, if any."""
        while len(received) >= FRAME.size:
            stop = FRAME.size + int(FRAME.unpack_from(received)[0])
            if len(received) < stop:
                break
            answer = cast("dict[str, object]", json.loads(received[FRAME.size : stop]))
            del received[:stop]
            number = int(cast("int", answer["number"]))
            if answer.get("late") == "hung":
                return number
            with self._lock:
                asked = self._asked.pop(number)
            started = self._process.started
            started.drain()
            started.output.end_call()
            _give(asked.answer, answer)
        if received and time.monotonic() - self._grown > self._longest():
            raise ValueError("an answer was begun and not ended")
        return None

    def _longest(self) -> float:
        """Return the longest deadline in seconds of the operations in flight."""
        with self._lock:
            return max((each.seconds for each in self._asked.values()), default=math.inf)

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
        if now - self._since <= limit:
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
