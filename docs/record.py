"""Records what a terminal shows of a command, as asciinema's text, and says the longest silence.

    python docs/record.py OUTPUT.cast COMMAND ...

The command runs on a terminal of its own, of 100 columns. A file of the format asciicast v2: a
header, then [seconds, "o", text] of each thing written.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import shutil
import struct
import sys
import termios
import time
from pathlib import Path

COLUMNS, ROWS = 100, 30


def record(words: list[str]) -> tuple[list[tuple[float, str]], int]:
    """Seconds and text of all that a command writes to a terminal, and its exit status."""
    start = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execvp(words[0], words)
    events = []
    try:
        while data := os.read(terminal, 65536):
            events.append((time.monotonic() - start, data.decode("utf-8", "replace")))
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [*events, (time.monotonic() - start, "")], status


def longest_silence(events: list[tuple[float, str]]) -> tuple[float, float]:
    """Seconds in which nothing was written, and when they began."""
    times = [0.0, *(seconds for seconds, _ in events)]
    return max((b - a, a) for a, b in itertools.pairwise(times))


def main(argv: list[str]) -> int:
    """Write the file; the command's exit status."""
    path, words = Path(argv[0]), argv[1:]
    if shutil.which(words[0]) is None:
        sys.exit(f"no command {words[0]}")
    events, status = record(words)
    shown = " ".join([Path(words[0]).name, *words[1:]])
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "command": shown}
    lines = [json.dumps(header), *(json.dumps([round(t, 3), "o", text]) for t, text in events)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    silence, began = longest_silence(events)
    seconds = events[-1][0]
    sys.stdout.write(f"{seconds:.1f} s; longest silence {silence:.1f} s, after {began:.1f} s\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
