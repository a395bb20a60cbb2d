"""The guard of a reward worker. Run as a file; imports the standard library and psutil.

    python -P supervisor.py CHANNEL MEMORY_BYTES WORKER.py

It starts the worker as its child and adopts whatever processes the worker leaves behind, also
those that opened new sessions. It kills all of them when the trainer closes the channel or dies,
when the worker ends, or when together they hold more memory than allowed. Then it ends the way
the worker did. It runs no code of users, so nothing can hold it up.
"""

import contextlib
import ctypes
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

MEMORY_REASON = b"memory"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS, _SCANS_EVERY = 0.25, 4
_MAX_ROUNDS = 2000
_PAGE_BYTES = resource.getpagesize()


def main() -> None:
    """Start the worker and watch it to its end."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    memory_bytes, program = int(sys.argv[2]), sys.argv[3]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getppid()
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        channel.close()
        os.close(woken)
        os.close(wakes)
        runpy.run_path(program, run_name="__main__")
        return
    null = os.open(os.devnull, os.O_RDWR)
    # The trainer must see the ends of these pipes when the worker is gone.
    os.dup2(null, 0)
    os.dup2(null, 1)
    _end_like(_watch(worker, parent, channel, woken, memory_bytes))


def _watch(
    worker: int, parent: int, channel: socket.socket, woken: int, memory_bytes: int
) -> int | None:
    """Wait for a reason to end, then kill all; return the wait status, None if killed here."""
    round_number = 0
    while True:
        ready, _, _ = select.select([channel.fileno(), woken], [], [], _POLL_SECONDS)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
        status = _reap(worker)
        if status is not None or channel.fileno() in ready or os.getppid() != parent:
            break
        round_number += 1
        if memory_bytes and _all_hold_more(memory_bytes, worker, round_number):
            with contextlib.suppress(OSError):
                channel.send(MEMORY_REASON)
            break
    for _ in range(_MAX_ROUNDS):
        processes = psutil.Process().children(recursive=True)
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _reap(worker)
        time.sleep(0.001)
    return status


def _end_like(status: int | None) -> None:
    """End this process as the worker ended."""
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    signal.pause()


def _reap(worker: int) -> int | None:
    """Collect ended processes; return the wait status of the worker if it is among them."""
    worker_status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == worker:
                worker_status = status
    return worker_status


def _all_hold_more(limit: int, worker: int, round_number: int) -> bool:
    """Return whether the worker, or in some rounds all processes, exceed the limit."""
    supervisor, is_scan = psutil.Process(), round_number % _SCANS_EVERY == 0
    return holds_more(
        supervisor.children(recursive=True) if is_scan else [psutil.Process(worker)], limit
    )


def holds_more(processes: Sequence[psutil.Process], limit: int) -> bool:
    """Return whether processes together hold more bytes than the limit."""
    if sum(map(_resident_bytes, processes)) <= limit:
        return False
    # Pages that processes share were counted for each of them.
    return sum(map(_proportional_bytes, processes)) > limit


def _resident_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(OSError):
        return int((memory_folder(process.pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _proportional_bytes(process: psutil.Process) -> int:
    """Return the memory of a process, with its share of what it shares with others."""
    with contextlib.suppress(OSError, ValueError):
        sums = (memory_folder(process.pid) / "smaps_rollup").read_bytes()
        return 1024 * int(sums.partition(b"\nPss:")[2].split(maxsplit=1)[0])
    return _resident_bytes(process)


def memory_folder(process: int) -> Path:
    """Return the `/proc` folder of a process's memory, or of a thread if the first has ended.

    Raises:
        OSError: The process is gone.
    """
    for folder in (Path(f"/proc/{process}"), *Path(f"/proc/{process}/task").iterdir()):
        with contextlib.suppress(OSError):
            if not (folder / "statm").read_text().startswith("0 "):
                return folder
    raise ProcessLookupError(process)


if __name__ == "__main__":
    main()
