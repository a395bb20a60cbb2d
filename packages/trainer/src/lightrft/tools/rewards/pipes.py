"""Input and output of a process, within limits."""

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
# Longest interval between two checks whether to stop.
_POLL_SECONDS = 0.25
_RANDOM = random.Random()


@dataclass(frozen=True, slots=True)
class Captured:
    """Output of a process.

    Args:
        stdout, stderr: Output, each cut at the limit.
        is_complete: Whether the process ended before any limit.
        is_full: Whether it printed more than the limit.
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
    """Send the input and read both outputs until the process ends or a limit is reached.

    Args:
        process: Process with three pipes; its remaining children may hold them open.
        stdin: Standard input of the process.
        ends: Deadline on the clock of `time.monotonic`.
        max_bytes: Limit of both outputs together.
        is_over: Function that says whether to stop; called at least four times a second.
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
            # Random intervals: a process must not predict the checks by its output.
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
    """Send a chunk and return the rest; nothing is left if nobody reads."""
    try:
        return pending[os.write(file, pending[:_CHUNK]) :] if pending else pending
    except BrokenPipeError:
        return pending[:0]


def _has_ended(
    process: "subprocess.Popen[bytes]", ends: float, is_over: Callable[[], bool]
) -> bool:
    """Return whether the process ends in time; it may close its outputs and go on.

    The process is not reaped, so no other process can get its id or its group's.
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
