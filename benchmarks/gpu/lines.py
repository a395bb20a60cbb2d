"""Lines of the table: each is on the disk as soon as it is known, whatever ends the process."""

from __future__ import annotations

import json
import os
from pathlib import Path

PATH = "LIGHTRFT_TABLE"
REHEARSAL = "LIGHTRFT_REHEARSAL"


def add(part: str, name: str, **values: object) -> None:
    """Append one line to the file that the environment names, and wait for the disk.

    Args:
        part: Part of the table.
        name: Row of the part.
        values: Columns.
    """
    line = json.dumps({"part": part, "name": name, **values})
    print(line, flush=True)
    if os.environ.get(PATH):
        with Path(os.environ[PATH]).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def read(path: Path) -> list[dict]:
    """Return the lines of a file; one that was cut in the middle is left out."""
    lines = []
    for text in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def is_rehearsal() -> bool:
    """Return whether every step runs in a tiny shape, on any device."""
    return bool(os.environ.get(REHEARSAL))
