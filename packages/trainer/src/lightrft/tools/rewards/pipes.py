"""Feeding a process and reading it, within limits."""

import os
import random
import select
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, cast

_CHUNK = 1 << 16
# The longest interval of the question whether to stop.
_POLL_SECONDS = 0.25
_RANDOM = random.Random()


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
            # What a process writes must not say when it is looked at.
            for key, _ in selector.select(min(left, _POLL_SECONDS * _RANDOM.random())):
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
    poll = select.poll()  # `select` takes no file numbers from 1024 on
    poll.register(watched, select.POLLIN)
    try:
        while True:
            left = max(0.0, ends - time.monotonic())
            if poll.poll(1000 * min(left, _POLL_SECONDS * _RANDOM.random())):
                return True
            if not left or is_over():
                return False
    finally:
        os.close(watched)
