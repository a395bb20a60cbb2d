"""Computations that may run without end or die, in a fork of this process."""

import json
import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Never

from lightrft.rewards.worker import ReportedError


class Fork:
    """A forked process for calls of a function; ends when a call takes too much processor time.

    The next call forks anew, within milliseconds. Wall-clock time is not limited here, so a busy
    machine changes no result; callers of the worker have a deadline. Results may contain untrusted
    data and therefore come as JSON.

    Args:
        compute: Function to call; returns plain values.
    """

    def __init__(self, compute: Callable[..., object]) -> None:
        self._compute = compute
        self._running: tuple[int, Connection] | None = None

    def call(self, *arguments: object, seconds: float) -> object:
        """Return the result; None if it took more processor time or the fork ended itself.

        Raises:
            ReportedError: The system killed the fork, which says nothing about the arguments.
        """
        process, channel = self._running = self._running or self._start()
        try:
            channel.send((arguments, seconds))
            return json.loads(channel.recv_bytes())
        except (EOFError, OSError, ValueError):
            _, status = os.waitpid(process, 0)
            channel.close()
            self._running = None
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            raise ReportedError("the system killed its process, as it does when memory is used up")
        return None

    def close(self) -> None:
        """End the fork; may be called twice."""
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
        """Answer calls until the other end is closed."""
        try:
            # An expired timer ends the process, in native code too.
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            while True:
                arguments, seconds = channel.recv()
                signal.setitimer(signal.ITIMER_PROF, seconds)
                answer = json.dumps(self._compute(*arguments)).encode()
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.send_bytes(answer)
        finally:
            os._exit(0)
