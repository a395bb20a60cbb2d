"""Feeding a process, reading it and measuring what it uses, within limits."""

import contextlib
import os
import select
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

from lightrft.rewards.supervisor import holds_more

_CHUNK = 1 << 16
# The interval of looks at what a process uses, and of the question whether to stop.
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Captured:
    """Output of a process.

    Args:
        stdout, stderr: Together at most the limit.
        is_complete: The process ended before any limit.
        is_full: It printed more than the limit.
    """

    stdout: bytes
    stderr: bytes
    is_complete: bool
    is_full: bool


def capture(
    process: "subprocess.Popen[bytes]",
    stdin: bytes,
    *,
    ends: float,
    max_bytes: int,
    is_over: Callable[[], bool],
) -> Captured:
    """Sends the input and reads both outputs until the process ends or a limit is reached.

    Args:
        process: With three pipes; what it leaves running may hold them open.
        stdin: Its standard input.
        ends: By `time.monotonic`.
        max_bytes: Of both outputs together.
        is_over: Asked at least four times a second whether to stop.
    """
    pipes = cast("tuple[IO[bytes], ...]", (process.stdin, process.stdout, process.stderr))
    outputs = {file.fileno(): bytearray() for file in pipes[1:]}
    writes, pending = pipes[0].fileno(), memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for file in outputs:
            os.set_blocking(file, False)
            selector.register(file, selectors.EVENT_READ)
        os.set_blocking(writes, False)
        selector.register(writes, selectors.EVENT_WRITE)
        num_open, is_full = len(outputs), False
        while num_open and not is_full:
            left = ends - time.monotonic()
            if left <= 0 or is_over():
                break
            for key, _ in selector.select(min(left, _POLL_SECONDS)):
                if key.fd == writes:
                    pending = _send(writes, pending)
                    if not pending:
                        selector.unregister(writes)
                        pipes[0].close()
                    continue
                chunk = os.read(key.fd, _CHUNK)
                outputs[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                    num_open -= 1
            is_full = sum(map(len, outputs.values())) > max_bytes
    is_complete = not num_open and not is_full and _has_ended(process, ends, is_over)
    stdout, stderr = (bytes(part[:max_bytes]) for part in outputs.values())
    return Captured(stdout, stderr, is_complete, is_full)


def _send(file: int, pending: memoryview) -> memoryview:
    """The rest that is still to be sent; nothing if nobody reads."""
    try:
        return pending[os.write(file, pending[:_CHUNK]) :] if pending else pending
    except BrokenPipeError:
        return pending[:0]


def _has_ended(
    process: "subprocess.Popen[bytes]", ends: float, is_over: Callable[[], bool]
) -> bool:
    """Whether the process ends in time; it may close its outputs and go on.

    It is not reaped: until then its number, and that of its group, belong to nobody else.
    """
    watched = os.pidfd_open(process.pid)
    try:
        while True:
            left = max(0.0, ends - time.monotonic())
            if select.select([watched], [], [], min(left, _POLL_SECONDS))[0]:
                return True
            if not left or is_over():
                return False
    finally:
        os.close(watched)


class Consumption:
    """Memory and processor time of a process and those below it, looked at four times a second.

    None of it depends on what else the machine does: a process that waits for a processor or for
    the disk does not wait by itself. Processes that live between two looks count with the
    processor time of those that waited for them.

    Args:
        process: Id of the first process, which ends after all others.
        memory_bytes: Limit of all together; pages that several share count once.
        busy_seconds: Limit of their processor time.
        idle_seconds: Limit of the time in which none of them had anything to do.
    """

    def __init__(
        self, process: int, *, memory_bytes: int, busy_seconds: float, idle_seconds: float
    ) -> None:
        self._root = psutil.Process(process)
        self._memory_bytes = memory_bytes
        self._busy_limit, self._idle_limit = busy_seconds, idle_seconds
        self._looked = time.monotonic()
        self._busy = self._idle = 0.0

    def is_over(self) -> bool:
        """Whether a limit has been passed; looks if it is time for that."""
        passed = time.monotonic() - self._looked
        if passed < _POLL_SECONDS:
            return False
        self._looked += passed
        processes = [self._root]
        with contextlib.suppress(psutil.Error):
            processes += self._root.children(recursive=True)
        busy = max(self._busy, sum(map(_processor_seconds, processes)))
        if not any(map(_has_work, processes)):
            # A look that comes late says little of the time since the last one.
            self._idle += max(0.0, min(passed, 2 * _POLL_SECONDS) - (busy - self._busy))
        self._busy = busy
        return (
            busy > self._busy_limit
            or self._idle > self._idle_limit
            or holds_more(processes, self._memory_bytes)
        )


def _processor_seconds(process: psutil.Process) -> float:
    """Of the process, and of its children that have ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _has_work(process: psutil.Process) -> bool:
    """Whether a thread of it runs, or waits for a processor or the disk."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                # The name before the state may hold anything, brackets too.
                if (thread / "stat").read_text().rpartition(") ")[2][:1] in ("R", "D"):
                    return True
    return False
