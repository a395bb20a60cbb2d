"""A terminal without a window: what a program writes to it, and what then stands on its screen."""

import os
import pty
import re
import threading
import time
from contextlib import contextmanager

from tests.machine import seconds

ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen:
    """Rows of a terminal that knows what rich writes; `wrapped` are lines that did not fit."""

    def __init__(self, width):
        self.width, self.rows, self.row, self.column, self.wrapped = width, [""], 0, 0, []

    def feed(self, text):
        """Takes what was written."""
        place = 0
        while place < len(text):
            found = ESCAPE.match(text, place)
            if found:
                place = found.end()
                if found[2] == "A":
                    self.row -= int(found[1] or 1)
                elif found[2] == "K":
                    self.rows[self.row] = ""
                continue
            self._put(text[place])
            place += 1

    def _put(self, symbol):
        if symbol == "\r":
            self.column = 0
        elif symbol == "\n":
            self._down()
        else:
            if self.column >= self.width:
                self.wrapped.append(self.rows[self.row])
                self._down()
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + symbol + row[self.column + 1 :]
            self.column += 1

    def _down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def shown(self):
        """Rows with something on them."""
        return [row.rstrip() for row in self.rows if row.strip()]


@contextmanager
def open_terminal():
    """The end of a terminal that a program writes to; `.seen()` gives what was written."""
    leader, follower = pty.openpty()
    seen = []

    def drain():
        try:
            while part := os.read(leader, 1 << 16):
                seen.append(part)
        except OSError:
            pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    with os.fdopen(follower, "w") as stream:
        stream.seen = lambda: b"".join(seen).decode(errors="replace")
        yield stream
    reader.join(10)
    os.close(leader)


def wait_for(condition):
    """Waits, for a minute at most."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds(60)
        time.sleep(0.01)
