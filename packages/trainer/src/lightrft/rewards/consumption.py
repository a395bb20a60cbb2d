"""Processor time and memory of a process and its descendants, whatever else the machine does."""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from lightrft.rewards.supervisor import holds_more, memory_folder

POLL_SECONDS = 0.25
# Calls in which a process waits for its child to start another program, by kind of machine.
_VFORKS = {"x86_64": (56, 58, 435)}.get(os.uname().machine, (220, 435))
# Upper bounds: both buffers of a socket, pages of a pipe, an entry of a file system in memory.
_SOCKET_BYTES, _DESCRIPTOR_BYTES, _ENTRY_BYTES = 512 << 10, 8 << 10, 2 << 10
# Bytes per memory mapping of a process, and bytes per mapping and process that may be a copy.
_PIECE_BYTES, _COPY_BYTES = 512, 64
_STATUS = re.compile(rb"^(FDSize|VmPTE|VmSwap):\s+(\d+)", re.MULTILINE)
_SHARED = re.compile(rb"^\S+ ...s \S+ (\S+ \d+) +/dev/zero \(deleted\)$", re.MULTILINE)
_IN_MEMORY = re.compile(rb"^(?:\S+ ){4}/(\S*) .* - tmpfs \S+ rw", re.MULTILINE)
_ESCAPED = re.compile(rb"\\([0-7]{3})")


class Consumption:
    """Memory and processor time of a process and its descendants, sampled four times a second.

    Other load of the machine does not count: waiting for a processor or the disk is not idle time.
    Processes that live between two samples count by the processor time of those that waited for
    them. Children that their parent ignores count nowhere once they have ended. Therefore the
    running processes at each sample are extrapolated, and may sum to twice the limit.

    Args:
        process: Id of the first process, which ends after all others.
        busy_seconds: Limit of their processor time.
        idle_seconds: Limit of the time in which none of them had anything to do.
        memory_bytes: Limit of all together, with shared pages counted once. None sets none.
        shared_bytes: Size assumed of each piece of anonymous memory that several can share: its
            mappings do not show how large it is.

    Attributes:
        busy_seconds, idle_seconds: Totals at the last sample.
        is_too_large: Whether memory has passed its limit.
    """

    def __init__(
        self,
        process: int,
        *,
        busy_seconds: float,
        idle_seconds: float,
        memory_bytes: int | None = None,
        shared_bytes: int = 0,
    ) -> None:
        self._root = psutil.Process(process)
        self._memory_bytes, self._shared_bytes = memory_bytes, shared_bytes
        self._busy_limit, self._idle_limit = busy_seconds, idle_seconds
        self._looked = time.monotonic()
        self.busy_seconds = self.idle_seconds = 0.0
        self.is_too_large = False
        self._sampled_seconds, self._runs = 0.0, dict[Path, int]()

    def is_over(self) -> bool:
        """Return whether a limit has been passed; take a sample if one is due."""
        passed = time.monotonic() - self._looked
        if passed < POLL_SECONDS:
            return False
        self._looked += passed
        processes = [self._root]
        processes += _below(self._root)
        busy = max(self.busy_seconds, sum(map(_processor_seconds, processes)))
        working = [thread for process in processes for thread in _working_threads(process)]
        if not working:
            # A late sample says little about the time since the last one.
            most = min(passed, 2 * POLL_SECONDS)
            self.idle_seconds += max(0.0, most - (busy - self.busy_seconds))
        self._sample(working, min(passed, 4 * POLL_SECONDS))
        self.busy_seconds = max(busy, self._sampled_seconds / 2)
        if self._memory_bytes is not None:
            unmapped = _unmapped_bytes(processes, self._shared_bytes)
            self.is_too_large |= holds_more(processes, self._memory_bytes - unmapped)
        is_late = self.busy_seconds > self._busy_limit or self.idle_seconds > self._idle_limit
        return is_late or self.is_too_large

    def _sample(self, working: Sequence[Path], passed: float) -> None:
        """Add what threads ran since the last sample; new threads stand for all that came and went.

        New threads count with the time that passed, times the share of a processor that they got.
        """
        runs = dict[Path, int]()
        for thread in working:
            with contextlib.suppress(OSError, ValueError):  # gone, or an option of the kernel
                run, wait = map(int, (thread / "schedstat").read_bytes().split()[:2])
                runs[thread] = run
                if thread in self._runs:
                    self._sampled_seconds += max(0, run - self._runs[thread]) / 1e9
                else:
                    self._sampled_seconds += passed * run / max(1, run + wait)
        self._runs = runs


def _below(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants as the kernel lists them: the table of all processes may be long."""
    threads = Path(f"/proc/{process.pid}/task")
    descendants, names = list[psutil.Process](), list[str]()
    with contextlib.suppress(OSError, psutil.Error):
        if not (threads / str(process.pid) / "children").exists():
            return [*process.children(recursive=True)]  # an option of the kernel
        for thread in threads.iterdir():
            names += (thread / "children").read_text().split()
    for name in names:
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(int(name))
            descendants += [child, *_below(child)]
    return descendants


def _processor_seconds(process: psutil.Process) -> float:
    """Return the seconds of the process and of its children that have ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _working_threads(process: psutil.Process) -> list[Path]:
    """Return the threads that run, or wait for a processor or the disk."""
    working = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                # The name before the state may hold any bytes, brackets too.
                state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
                waits = {b"R": _gives_way, b"D": _waits_for_child}.get(state)
                if waits is not None and not waits(thread):
                    working.append(thread)
    return working


def _gives_way(thread: Path) -> bool:
    """Return whether its session has lower priority; no session starts with one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((thread.parents[1] / "autogroup").read_bytes().split()[2]) > 0
    return False


def _waits_for_child(thread: Path) -> bool:
    """Return whether it seems to wait for the disk, but waits for its child's exec (vfork)."""
    with contextlib.suppress(OSError, ValueError):
        return int((thread / "syscall").read_text().split()[0]) in _VFORKS
    return False


def _unmapped_bytes(processes: Sequence[psutil.Process], shared_bytes: int) -> int:
    """Return an upper bound of what processes hold beside their mapped pages.

    Page tables, pipe buffers and anonymous shared memory are counted for all processes. Sockets
    and file entries in memory are counted for a sandbox.
    """
    total, shared, inside = 0, set[bytes](), None
    for process in processes:
        with contextlib.suppress(OSError):
            folder = memory_folder(process.pid)
            sizes = dict(_STATUS.findall((folder / "status").read_bytes()))
            total += int(sizes.get(b"FDSize", 0)) * _DESCRIPTOR_BYTES
            total += 1024 * sum(int(sizes.get(name, 0)) for name in (b"VmPTE", b"VmSwap"))
            pieces = (folder / "maps").read_bytes()
            shared.update(_SHARED.findall(pieces))
            piece_bytes = _PIECE_BYTES + _COPY_BYTES * len(processes)
            total += pieces.count(b"\n") * piece_bytes
            if (folder / "ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino:
                inside = folder
    if inside is not None:
        total += _socket_bytes(inside) + _entry_bytes(inside)
    return total + len(shared) * shared_bytes


def _socket_bytes(process: Path) -> int:
    """Return the bytes of all sockets of its network namespace, closed ones included."""
    num_sockets = queued = 0
    with contextlib.suppress(OSError):
        words = (process / "net/sockstat").read_text().split()
        num_sockets = int(words[words.index("used") + 1])
        for name in ("tcp", "tcp6"):
            for line in (process / "net" / name).read_text().splitlines()[1:]:
                queued += sum(int(size, 16) for size in line.split()[4].split(":"))
    return num_sockets * _SOCKET_BYTES + 2 * queued


def _entry_bytes(process: Path) -> int:
    """Return the bytes of files and folders in the in-memory file systems that it can write."""
    total, places = 0, list[bytes]()
    with contextlib.suppress(OSError):
        places = _IN_MEMORY.findall((process / "mountinfo").read_bytes())
    for place in places:
        name = _ESCAPED.sub(lambda code: bytes([int(code[1], 8)]), place)
        with contextlib.suppress(OSError):
            sizes = os.statvfs(bytes(process / "root") + b"/" + name)
            total += (sizes.f_files - sizes.f_ffree) * _ENTRY_BYTES
    return total
