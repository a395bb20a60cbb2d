"""Worker processes that can be killed when a deadline passes.

The worker is a new interpreter that runs `worker.py`, not a fork and not a spawn of the present
program: it holds no CUDA context, no process group and no lock of the trainer, and a script
without an `if __name__ == "__main__"` guard is not run twice.
"""

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from lightrft.rewards import worker as worker_module
from lightrft.rewards.worker import FRAME

_CHUNK = 1 << 16


class WorkerTimeoutError(Exception):
    """The worker did not answer in time; it has been killed."""


class WorkerFailedError(Exception):
    """The worker answered with an error, or died.

    Args:
        message: Type and message of the exception, or how the process ended.
        kind: Name of the exception's type; empty if the process ended.
        traceback: The user's part of it; empty if there is none.
    """

    def __init__(self, message: str, *, kind: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.traceback = traceback


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a worker runs.

    Args:
        module, factory: The worker imports `module` and calls `factory(*arguments)`.
        arguments: Picklable.
        shown_file: Tracebacks start at the first frame of this file.
        memory_bytes: Limit of the worker's address space; None sets none.
        start_seconds: Deadline of the start, imports included.
    """

    module: str
    factory: str
    arguments: tuple[object, ...] = ()
    shown_file: str | None = None
    memory_bytes: int | None = None
    start_seconds: float = 120.0


class WorkerProcess:
    """One worker, started on first use and again after it was killed."""

    def __init__(self, task: WorkerTask) -> None:
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], WorkerProcess] | None = None
        self.num_starts = 0

    def start(self) -> object:
        """Starts the worker: what its handler says of itself.

        Raises:
            WorkerFailedError: the task could not be set up, or not within `start_seconds`.
        """
        self.close()
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker_module.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that its children die with it, and Ctrl-C does not hit it
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)
        self.num_starts += 1
        seconds = self._task.start_seconds
        try:
            return self._exchange(process, {"path": sys.path, **asdict(self._task)}, seconds)
        except WorkerTimeoutError as err:
            raise WorkerFailedError(
                f"the worker process was not ready within {seconds:g} s"
            ) from err
        except WorkerFailedError:
            self.close()
            raise

    def call(self, request: object, *, seconds: float) -> object:
        """The handler's answer.

        Args:
            request: Picklable.
            seconds: Deadline, without the time to start the worker.

        Raises:
            WorkerTimeoutError: no answer in time; the worker is killed, the next call starts
                another.
            WorkerFailedError: the handler raised, or the worker died.
        """
        process = self._process
        if process is None or process.poll() is not None:
            self.start()
            process = self._process
        assert process is not None
        return self._exchange(process, request, seconds)

    def close(self) -> None:
        """Kills the worker and its children, if it runs."""
        if self._finalizer is not None:
            self._finalizer()
        self._process, self._finalizer = None, None

    def _exchange(
        self, process: subprocess.Popen[bytes], message: object, seconds: float
    ) -> object:
        body = pickle.dumps(message)
        deadline = time.monotonic() + seconds
        try:
            answer = _transfer(process, FRAME.pack(len(body)) + body, deadline)
        except (WorkerTimeoutError, KeyboardInterrupt):
            self.close()
            raise
        except (BrokenPipeError, EOFError) as err:
            self.close()
            raise WorkerFailedError(_ending(process.returncode)) from err
        reply = cast("dict[str, object]", json.loads(answer))
        if "error" in reply:
            raise WorkerFailedError(
                str(reply["error"]), kind=str(reply["kind"]), traceback=str(reply["traceback"])
            )
        return reply["ok"]


def _transfer(process: subprocess.Popen[bytes], outgoing: bytes, deadline: float) -> bytes:
    """Sends a frame and reads one, both without blocking beyond the deadline."""
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(requests, False)
    os.set_blocking(answers, False)
    pending, received = memoryview(outgoing), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_WRITE)
        selector.register(answers, selectors.EVENT_READ)
        while not _is_complete(received):
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready and time.monotonic() >= deadline:
                raise WorkerTimeoutError
            for key, _ in ready:
                if key.fd == requests:
                    pending = pending[os.write(requests, pending[:_CHUNK]) :]
                    if not pending:
                        selector.unregister(requests)
                    continue
                chunk = os.read(answers, _CHUNK)
                if not chunk:
                    raise EOFError
                received += chunk
    return bytes(received[FRAME.size :])


def _is_complete(received: bytearray) -> bool:
    if len(received) < FRAME.size:
        return False
    size = cast("int", FRAME.unpack_from(received)[0])
    return len(received) >= FRAME.size + size


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the group id is its pid
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        is_killed = returncode == -signal.SIGKILL
        why = "out of memory, or killed by hand" if is_killed else "a crash in native code"
        return f"the worker process was ended by {name} ({why})"
    return f"the worker process ended with exit code {returncode}"
