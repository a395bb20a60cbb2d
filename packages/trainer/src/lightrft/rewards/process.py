"""Worker processes that can be killed when a deadline passes.

The worker is a new interpreter that runs `worker.py`, not a fork or a spawn of this program. It
holds no CUDA context, process group or lock of the trainer, and a script without an
`if __name__ == "__main__"` guard is not run twice. `supervisor.py` stands between: it ends the
worker with everything that it started, also when the trainer itself is killed.
"""

import contextlib
import json
import os
import pickle
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from lightrft.config.printable import printable
from lightrft.rewards import supervisor as supervisor_module, worker as worker_module
from lightrft.rewards.consumption import POLL_SECONDS, Consumption
from lightrft.rewards.supervisor import MEMORY_REASON
from lightrft.rewards.worker import FRAME, take_frames
from lightrft.utils.scratch import remove_left_folders

_CHUNK = 1 << 16
_END_SECONDS = 10.0
_BACKSTOP_FACTOR = 10
_MAX_CHUNKS = 64


class WorkerTimeoutError(Exception):
    """The worker did not answer in time; it has been killed."""


class WorkerFailedError(Exception):
    """The worker answered with an error, or died.

    Args:
        message: Type and message of the exception, or how the process ended.
        kind: Name of the exception's type; empty if the process ended.
        traceback: Part of the traceback in the user's code, `where` on lines of its own; empty if
            there is none.
    """

    def __init__(self, message: str, *, kind: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.where = f"\n{traceback}" if traceback else ""


# A variable is withheld if one of its words, between underscores, is one of these ...
_WORD = re.compile(
    "keys?|apikey|tokens?|secrets?|password|passwd|pass|pat|auth|credentials?|cookie"
)
# ... or ends so, as WANDB_APIKEY2 or MYTOKEN do, or if its value is an address with a password.
_ENDINGS = re.compile(r"(apikey|token|secret|password|passwd)\d*$")
_HAS_PASSWORD = re.compile(r"://[^/\s]*@")


def worker_environment(
    passed: Collection[str] = (), source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment's variables without secrets.

    Args:
        passed: Names of secrets to pass nevertheless.
        source: Variables to filter; None takes the environment of this process.
    """
    source = os.environ if source is None else source
    return {
        name: value
        for name, value in source.items()
        if name in passed or not (names_a_secret(name) or _HAS_PASSWORD.search(value))
    }


def names_a_secret(name: str) -> bool:
    """Return whether the name of a variable says that its value is a secret."""
    lower = name.lower()
    return any(map(_WORD.fullmatch, lower.split("_"))) or bool(_ENDINGS.search(lower))


MAX_LINES, MAX_CHARACTERS = 20, 500


class WorkerOutput:
    """Output of a worker: passes the first lines of each call to standard error.

    Args:
        name: Name of the reward function, for the line that counts the lines not shown.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending = b""
        self._num_lines = 0
        self.has_ended = False

    def feed(self, chunk: bytes) -> None:
        """Take what was read from the worker; nothing is its end."""
        self.has_ended = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._pending) > 4 * MAX_CHARACTERS:
            self._pending = self._pending[: 4 * MAX_CHARACTERS]

    def end_call(self) -> None:
        """End the last line, and say how many were left out."""
        if self._pending:
            self._take(self._pending)
            self._pending = b""
        if self._num_lines > MAX_LINES:
            num_more = self._num_lines - MAX_LINES
            _write(f"reward {self._name} printed {num_more} more lines, which are not shown")
        self._num_lines = 0

    def _take(self, line: bytes) -> None:
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            text = line[: 4 * MAX_CHARACTERS].decode(errors="replace")
            _write(printable(text, limit=MAX_CHARACTERS))


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The handler that a worker runs, and its limits.

    Args:
        module, factory: The worker imports `module` and calls `factory(*arguments)`.
        arguments: Picklable arguments of the factory.
        shown_file: Tracebacks start at the first frame of this file.
        memory_bytes: Limit of the worker's address space; None sets none.
        resident_bytes: Memory that the worker and its children may hold together; None sets no
            limit. It is measured four times a second.
        memory_option: Option that sets `resident_bytes`.
        passed_variables: Variables of the environment that it gets although they are secrets.
        start_seconds: Limit of the start, imports included. A slower start is accepted until the
            worker has computed or waited that long in sum: a busy machine ends no run.
    """

    module: str
    factory: str
    arguments: tuple[object, ...] = ()
    shown_file: str | None = None
    memory_bytes: int | None = None
    resident_bytes: int | None = None
    memory_option: str = "--reward_memory_gb"
    passed_variables: tuple[str, ...] = ()
    start_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that runs.

    Args:
        process: Process of its supervisor.
        channel: Socket that ends both when closed; says why the supervisor ended the worker.
        output: Output of the worker.
        unsent: Frames that are not yet written; other threads may append to them.
        received: Beginning of a frame whose end is still to come.
    """

    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: WorkerOutput
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def _pipes(self) -> tuple[int, int, int]:
        """Return the pipes of requests, answers and printed output; none of them blocks."""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()

    def send(self, message: object) -> None:
        """Append a message to those that `exchange` writes."""
        body = pickle.dumps(message)
        self.unsent.extend(FRAME.pack(len(body)) + body)

    def exchange(self, seconds: float | None, *, wakes: int | None = None) -> list[bytes]:
        """Write and read what the pipes take and have; return the answers that are complete.

        Args:
            seconds: Longest wait for something to write or read; None waits without end.
            wakes: Pipe whose bytes end the wait.

        Raises:
            EOFError: The worker has ended.
        """
        requests, answers, printed = self._pipes()
        poll = select.poll()
        poll.register(answers, select.POLLIN)
        if self.unsent:
            poll.register(requests, select.POLLOUT)
        if not self.output.has_ended:
            poll.register(printed, select.POLLIN)
        if wakes is not None:
            poll.register(wakes, select.POLLIN)
        for pipe, _ in poll.poll(None if seconds is None else 1000 * seconds):
            if pipe == requests:
                self._write(requests)
                continue
            chunk = os.read(pipe, _CHUNK)
            if pipe == printed:
                self.output.feed(chunk)
            elif pipe == answers and not chunk:
                raise EOFError
            elif pipe == answers:
                self.received.extend(chunk)
        return take_frames(self.received)

    def _write(self, requests: int) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                del self.unsent[: os.write(requests, self.unsent[:_CHUNK])]
            except BrokenPipeError:
                self.unsent.clear()  # the end of the answers explains it

    def end_call(self) -> None:
        """Take what the worker has printed by now, and end the output of a call."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_CHUNKS):
                chunk = os.read(self._pipes()[2], _CHUNK)
                self.output.feed(chunk)
                if not chunk:
                    break
        self.output.end_call()


class WorkerProcess:
    """One worker, started on first use and again after it was killed.

    Args:
        task: Task that it runs.
        name: Name shown with what it prints.
        inherited: File descriptors that it gets, for a handler that reads requests itself.
    """

    def __init__(
        self, task: WorkerTask, *, name: str = "", inherited: tuple[int, ...] = ()
    ) -> None:
        self._task = task
        self._inherited = inherited
        self._name = name or task.factory
        self._started: StartedWorker | None = None
        self._finalizer: weakref.finalize[[StartedWorker], WorkerProcess] | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, None while there is none."""
        return None if self._started is None else self._started.process.pid

    @property
    def is_running(self) -> bool:
        """Return whether there is a worker to call."""
        return self._started is not None and self._started.process.poll() is None

    def start(self, *, seconds: float | None = None) -> object:
        """Start the worker and return its handler's description.

        Args:
            seconds: Deadline, beside `start_seconds`.

        Raises:
            WorkerFailedError: The task could not be set up, or not in time.
        """
        self.close()
        ours, theirs = socket.socketpair()
        task = self._task
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(Path(supervisor_module.__file__)),
                str(theirs.fileno()),
                str(task.resident_bytes or 0),
                str(Path(worker_module.__file__)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=worker_environment(task.passed_variables) | {"PYTHONHASHSEED": "0"},
            pass_fds=(theirs.fileno(), *self._inherited),
            start_new_session=True,  # Ctrl-C does not hit it
        )
        theirs.close()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        started = StartedWorker(process, ours, WorkerOutput(self._name))
        self._started = started
        self._finalizer = weakref.finalize(self, _end, started)
        self.num_starts += 1
        limit, begun = task.start_seconds, time.monotonic()
        used = Consumption(process.pid, busy_seconds=limit, idle_seconds=limit)
        message = {"path": sys.path, "inherited": self._inherited, **asdict(task)}

        def is_over() -> bool:
            # Many threads may have used much processor time in a short time.
            return used.is_over() and time.monotonic() - begun > limit

        # A process that waits for a dead disk counts neither as busy nor as idle.
        most = _BACKSTOP_FACTOR * limit
        try:
            return self._exchange(started, message, min(seconds or most, most), is_over)
        except WorkerTimeoutError as err:
            raise WorkerFailedError(
                f"the worker process was not ready after {used.busy_seconds:.1f} s of computing "
                f"and {used.idle_seconds:.1f} s of waiting",
                kind="timeout",
            ) from err
        except WorkerFailedError:
            self.close()
            raise

    def call(self, request: object, *, seconds: float) -> object:
        """Return the handler's answer.

        Args:
            request: Picklable request.
            seconds: Deadline, without the time to start the worker.

        Raises:
            WorkerTimeoutError: No answer came in time. The worker is killed; the next call
                starts another.
            WorkerFailedError: The handler raised, or the worker died.
        """
        if not self.is_running:
            self.start()
        assert self._started is not None
        return self._exchange(self._started, request, seconds)

    def close(self) -> None:
        """Kill the worker and its children, if it runs."""
        if self._finalizer is not None:
            self._finalizer()
        self._started, self._finalizer = None, None

    def _exchange(
        self,
        started: StartedWorker,
        message: object,
        seconds: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> object:
        started.send(message)
        deadline, answers = time.monotonic() + seconds, list[bytes]()
        try:
            while not answers:
                left = deadline - time.monotonic()
                if left <= 0 or is_over():  # also while a worker prints without end
                    raise WorkerTimeoutError
                answers = started.exchange(min(left, POLL_SECONDS))
            started.end_call()
        except (WorkerTimeoutError, KeyboardInterrupt):
            self.close()
            raise
        except EOFError as err:
            text, _ = self.ending()
            self.close()
            raise WorkerFailedError(text) from err
        finally:
            started.output.end_call()
        reply = cast("dict[str, object]", json.loads(answers[0]))
        if "error" in reply:
            raise WorkerFailedError(
                str(reply["error"]), kind=str(reply["kind"]), traceback=str(reply["traceback"])
            )
        return reply["ok"]

    @property
    def started(self) -> StartedWorker:
        """The worker that runs."""
        assert self._started is not None
        return self._started

    def ending(self) -> tuple[str, bool]:
        """Return how the worker ended, in words, and whether it held too much memory."""
        started = self.started
        returncode: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            returncode = started.process.wait(_END_SECONDS)
        started.end_call()
        started.channel.setblocking(False)
        with contextlib.suppress(OSError):
            if started.channel.recv(len(MEMORY_REASON)) == MEMORY_REASON:
                size = (self._task.resident_bytes or 0) / 1e9
                text = f"it held more than the {size:g} GB that {self._task.memory_option} allows"
                return text, True
        if returncode is None or returncode >= 0:
            return f"the worker process ended with exit code {returncode}", False
        known = {each.value: each.name for each in signal.Signals}
        name = known.get(-returncode, f"signal {-returncode}")
        cause = (
            "the system does so when memory is used up"
            if returncode == -signal.SIGKILL
            else "a crash in native code"
        )
        return f"the worker process was ended by {name} ({cause})", False


def _end(started: StartedWorker) -> None:
    """Have the supervisor kill the worker and all its descendants, and wait for that."""
    process = started.process
    started.channel.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:  # somebody stopped the supervisor
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # a session leader: the group id is its pid
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    # A killed process does not remove its folders.
    remove_left_folders()


class WorkerPool:
    """Workers that are started when needed; the first one serves calls one by one.

    Args:
        task: Task that each one runs.
        size: Calls at once.
        name: Name shown with what they print.
    """

    def __init__(self, task: WorkerTask, *, size: int, name: str) -> None:
        self.workers = [WorkerProcess(task, name=name) for _ in range(size)]
        # Last in, first out: a second worker starts only while the first one is busy.
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put(worker)

    def start(self) -> object:
        """Start the first worker and return its handler's description."""
        return self.workers[0].start()

    def call(self, request: object, *, seconds: float) -> object:
        """Wait for an idle worker and return its answer; see `WorkerProcess.call`."""
        with self.idle() as worker:
            return worker.call(request, seconds=seconds)

    @contextlib.contextmanager
    def idle(self) -> Iterator[WorkerProcess]:
        """Wait for an idle worker, which nobody else calls until the end of the body."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; may be called twice."""
        for worker in self.workers:
            worker.close()
