"""A line on a terminal that names the work of a command while it prints nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

# Silence before the line comes, and time between updates of its seconds.
INTERVAL_SECONDS = 0.3
_ERASE = "\r\x1b[2K"


def is_terminal(stream: TextIO) -> bool:
    """Return whether a bar that redraws itself is welcome: on a person's terminal."""
    return stream.isatty() and "CI" not in os.environ and os.environ.get("TERM") != "dumb"


class StartBar:
    """One line below all others that is redrawn while nothing else is written to the terminal.

    Args:
        text: First words.
        stream: Terminal.
    """

    def __init__(self, text: str, stream: TextIO) -> None:
        self.text = text
        self._stream, self._start = stream, time.monotonic()
        self._end, self._lock = threading.Event(), threading.RLock()
        self._is_shown, self._may_show, self._written = False, True, False
        self._thread = threading.Thread(target=self._draw, name="start bar", daemon=True)
        self._thread.start()

    def write(self, text: str, stream: TextIO) -> int:
        """Write to a stream in place of the line, which comes back below whole lines."""
        with self._lock:
            self._erase()
            self._may_show, self._written = text.endswith("\n"), True
            return stream.write(text)

    def end(self) -> None:
        """Remove the line for good; later calls do nothing."""
        with self._lock:
            self._end.set()
            self._erase()

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._stream.write(_ERASE)
            self._stream.flush()

    def _draw(self) -> None:
        while not self._end.wait(INTERVAL_SECONDS):
            with self._lock:
                is_quiet, self._written = not self._written, False
                if is_quiet and self._may_show and not self._end.is_set():
                    seconds = time.monotonic() - self._start
                    self._stream.write(f"{_ERASE}{self.text}  {seconds:.0f} s")
                    self._stream.flush()
                    self._is_shown = True


class _Above:
    """A stream whose lines stand above the bar."""

    def __init__(self, stream: TextIO, bar: StartBar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        return self._bar.write(text, self._stream)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


_bars: list[StartBar] = []


@contextmanager
def start_bar(text: str) -> Iterator[None]:
    """While the body writes nothing, show on a terminal what it does."""
    streams = (sys.stdout, sys.stderr)
    if not is_terminal(sys.stdout) or os.environ.get("RANK", "0") != "0":
        yield
        return
    bar = StartBar(text, sys.stdout)
    _bars.append(bar)
    sys.stdout, sys.stderr = (_Above(each, bar) if each.isatty() else each for each in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        _bars.remove(bar)
        bar.end()


def start_text(text: str) -> None:
    """Set the text of the bar to what the command does now."""
    for bar in _bars:
        bar.text = text


def end_start_bar() -> None:
    """End the bar, for another one or for other processes that write to the terminal."""
    for bar in _bars:
        bar.end()
