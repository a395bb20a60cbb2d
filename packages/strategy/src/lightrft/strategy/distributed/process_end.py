"""Ends of a process: signals that ask for one, errors and last phases left for the launcher.

torch's elastic agent names a file in TORCHELASTIC_ERROR_FILE for each process, and `lightrft train`
a folder in LIGHTRFT_PHASE_FOLDER for all. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lightrft.config.files import parse_json, read_bytes, typed

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
PHASE_FOLDER_VARIABLE = "LIGHTRFT_PHASE_FOLDER"
# Set beside an OMP_NUM_THREADS that the launcher chose, not the user.
SHARED_THREADS_VARIABLE = "LIGHTRFT_SHARED_THREADS"
# Schedulers send one of these some time before they end a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class LastPhase:
    """The phase that a process recorded last.

    Args:
        name: Name of the phase.
        expires_unix: Time of its deadline; infinite between phases.
    """

    name: str
    expires_unix: float


def write_error_report(text: str, code: int) -> None:
    """Leave an error where the launcher looks for it, in torch's format; the first one wins."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path is None or os.path.exists(path):
        return
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    message = {"message": text, "extraInfo": extra, "errorCode": code, "seconds": now}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as stream:
        json.dump({"message": message}, stream)


def end_process(text: str, code: int) -> None:
    """Leave the error for the launcher, write all stacks to standard error, and end at once."""
    write_error_report(text, code)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(code)


def has_failed_peer() -> bool:
    """Return whether another process of this node has reported an error."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path is None:
        return False
    report = Path(path)  # <attempt>/<local rank>/error.json
    return any(other != report for other in report.parent.parent.glob(f"*/{report.name}"))


def record_phase(phase: LastPhase) -> None:
    """Leave the phase for the launcher, for ends that the process cannot report itself."""
    folder = os.environ.get(PHASE_FOLDER_VARIABLE)
    if folder is not None:
        path = Path(folder) / os.environ.get("RANK", "0")
        with contextlib.suppress(OSError):
            path.write_text(json.dumps([phase.name, phase.expires_unix]), encoding="utf-8")


def read_phase(folder: Path, rank: int) -> LastPhase | None:
    """Return the phase that a rank recorded last; None if it never did."""
    try:
        path = folder / str(rank)
        name, expires = typed(tuple[str | float, ...], parse_json(read_bytes(path), path), path)
        return LastPhase(str(name), float(expires))
    except ValueError:
        return None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let `STOP_SIGNALS` end the process at once while the body waits outside of Python.

    Handlers of Python would run only after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopRequest:
    """Flag that a signal asked this process to stop; nothing is interrupted."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for `STOP_SIGNALS` while the body runs; call it from the main thread."""
        before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __call__(self) -> bool:
        """Return whether a signal has come."""
        return self.signal_name is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and has_failed_peer():
            # This is torch's agent, which ends all ranks after one has failed.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_name = signal.Signals(number).name


class PeerFailedError(RuntimeError):
    """The failure of another rank; the message says which rank, and how."""


class NumericsError(RuntimeError):
    """Numbers of a run are unusable, or an alarm ended it; the message says which."""


class NonFiniteError(NumericsError):
    """Tensors hold values that are not finite; none was sent or written."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, or of another kind than expected."""


class RunStoppedError(Exception):
    """A run was asked to stop and has written a checkpoint.

    Args:
        num_steps: Completed steps.
        output_dir: Folder of the run.
    """

    def __init__(self, num_steps: int, output_dir: str) -> None:
        self.num_steps, self.output_dir = num_steps, output_dir
        super().__init__(
            f"stopped as asked after step {num_steps}, with a complete checkpoint in {output_dir}: "
            "the same command continues"
        )

    def __reduce__(self) -> tuple[type[RunStoppedError], tuple[int, str]]:
        return type(self), (self.num_steps, self.output_dir)
