"""What a reward function prints: a few lines of each call, and how many there were."""

import sys

from lightrft.config.printable import printable

MAX_LINES, MAX_CHARACTERS = 20, 500


class WorkerOutput:
    """Passes the first lines of each call on to standard error.

    Args:
        name: Of the reward function, for the line that says how many lines are not shown.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending = b""
        self._num_lines = 0

    def feed(self, chunk: bytes) -> None:
        """Takes what was read from the worker."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._pending) > 4 * MAX_CHARACTERS:
            self._pending = self._pending[: 4 * MAX_CHARACTERS]

    def end_call(self) -> None:
        """Ends the last line, and says how many were left out."""
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
