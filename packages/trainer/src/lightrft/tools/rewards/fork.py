"""Computations that may hang or die, in a fork of this process."""

import json
import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Never


class Fork:
    """Calls a function in a fork, which is killed when a call takes too long.

    The next call forks anew, within milliseconds. Results may be made of what a stranger wrote, so
    that they come as JSON.

    Args:
        compute: The function; its results are plain values.
    """

    def __init__(self, compute: Callable[..., object]) -> None:
        self._compute = compute
        self._running: tuple[int, Connection] | None = None

    def call(self, *arguments: object, seconds: float) -> object:
        """The result; None where it took longer, or the fork has died."""
        if self._running is None:
            self._running = self._start()
        _, channel = self._running
        try:
            channel.send(arguments)
            if channel.poll(seconds):
                return json.loads(channel.recv_bytes())
        except (EOFError, OSError, ValueError):
            pass
        self.close()
        return None

    def close(self) -> None:
        """Ends the fork; may be called twice."""
        if self._running is not None:
            process, channel = self._running
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            channel.close()
            self._running = None

    def _start(self) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            ours.close()
            self._serve(theirs)
        theirs.close()
        return process, ours

    def _serve(self, channel: Connection) -> Never:
        """Answers until the other end is closed."""
        try:
            while True:
                channel.send_bytes(json.dumps(self._compute(*channel.recv())).encode())
        finally:
            os._exit(0)
