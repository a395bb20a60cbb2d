"""One writer per run folder."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightrft.strategy.config import ConfigError
from collections.abc import Iterator
from pathlib import Path


LOCK_FILE = ".lock"


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Holds the folder; the system lets go of it when the process ends, however it does.

    A file system without locks is taken as it is.

    Raises:
        ConfigError: Another process holds it; the message names that process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise ConfigError(
                f"--output_dir: {folder} is being written by {stream.read().strip()}: wait for "
                "that run to end, or give another folder"
            ) from None
        except OSError:  # network file systems may know no locks
            yield
            return
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
