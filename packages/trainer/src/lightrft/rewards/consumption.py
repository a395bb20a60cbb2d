"""Processor time and memory of a process and those below it, whatever else the machine does."""

import contextlib
import time
from pathlib import Path

import psutil

from lightrft.rewards.supervisor import holds_more

POLL_SECONDS = 0.25


class Consumption:
    """Memory and processor time of a process and those below it, looked at four times a second.

    None of it depends on what else the machine does: a process that waits for a processor or for
    the disk does not wait by itself. Processes that live between two looks count with the
    processor time of those that waited for them.

    Args:
        process: Id of the first process, which ends after all others.
        busy_seconds: Limit of their processor time.
        idle_seconds: Limit of the time in which none of them had anything to do.
        memory_bytes: Limit of all together; pages that several share count once. None sets none.
    """

    def __init__(
        self,
        process: int,
        *,
        busy_seconds: float,
        idle_seconds: float,
        memory_bytes: int | None = None,
    ) -> None:
        self._root = psutil.Process(process)
        self._memory_bytes = memory_bytes
        self._busy_limit, self._idle_limit = busy_seconds, idle_seconds
        self._looked = time.monotonic()
        self.busy_seconds = self.idle_seconds = 0.0

    def is_over(self) -> bool:
        """Whether a limit has been passed; looks if it is time for that."""
        passed = time.monotonic() - self._looked
        if passed < POLL_SECONDS:
            return False
        self._looked += passed
        processes = [self._root]
        processes += _below(self._root)
        busy = max(self.busy_seconds, sum(map(_processor_seconds, processes)))
        if not any(map(_has_work, processes)):
            # A look that comes late says little of the time since the last one.
            self.idle_seconds += max(
                0.0, min(passed, 2 * POLL_SECONDS) - (busy - self.busy_seconds)
            )
        self.busy_seconds = busy
        return (
            busy > self._busy_limit
            or self.idle_seconds > self._idle_limit
            or (self._memory_bytes is not None and holds_more(processes, self._memory_bytes))
        )


def _below(process: psutil.Process) -> list[psutil.Process]:
    """Children and theirs: the kernel names them, for the table of all processes may be long."""
    threads = Path(f"/proc/{process.pid}/task")
    found, names = list[psutil.Process](), list[str]()
    with contextlib.suppress(OSError, psutil.Error):
        if not (threads / str(process.pid) / "children").exists():
            return [*process.children(recursive=True)]  # an option of the kernel
        for thread in threads.iterdir():
            names += (thread / "children").read_text().split()
    for name in names:
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(int(name))
            found += [child, *_below(child)]
    return found


def _processor_seconds(process: psutil.Process) -> float:
    """Of the process, and of its children that have ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _has_work(process: psutil.Process) -> bool:
    """Whether a thread of it runs, or waits for a processor or the disk."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                # The name before the state may hold anything, brackets too.
                if (thread / "stat").read_text().rpartition(") ")[2][:1] in ("R", "D"):
                    return True
    return False
