"""Two ranks that are programs of a test's own file, without a launcher that would end either."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from tests.ranks import find_free_port, rank_environment


def scaled(nominal):
    """Return seconds that are the same in the test and in its programs, also on a busy machine."""
    return nominal * float(os.environ.get("LIGHTRFT_TEST_TIME_FACTOR", "1"))


def note_fault(folder):
    """Write down when the fault happened."""
    Path(folder, "fault").write_text(str(time.time()))


def seconds_since_fault(folder, moment):
    fault = folder / "fault"
    return moment - float(fault.read_text()) if fault.exists() else float("nan")


def texts(folder):
    """Return what each rank has written."""
    return [(folder / f"rank{rank}.log").read_text() for rank in range(2)]


@contextmanager
def two_programs(file, folder, *words):
    """Start a file twice with words and the folder; end what is left of both."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes, port = [], find_free_port()
    for rank in range(2):
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, file, *words, str(folder)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | rank_environment(rank, 2, port),
                )
            )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
