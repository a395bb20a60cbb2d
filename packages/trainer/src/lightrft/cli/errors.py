"""Exit codes, and the conversion of an exception to a line on the terminal and a code."""

import atexit
import errno
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, cast

from lightrft.config.options import mask_address
from lightrft.config.printable import printable
from lightrft.config.registry import load_reference
from lightrft.strategy.distributed.process_end import PeerFailedError, write_error_report

if TYPE_CHECKING:
    from lightrft.config import TrainConfig


class ExitCode(IntEnum):
    """Codes that the shell sees."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    PREFLIGHT = 3
    DATA = 4
    REWARD = 5
    OUT_OF_MEMORY = 6
    DEADLINE = 7
    VERIFICATION = 8
    NUMERICS = 9
    STOPPED = 75
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class CommandError(Exception):
    """An error of a command whose message explains it; `code` is the exit code."""

    code: int = ExitCode.UNEXPECTED


class UsageError(CommandError, ValueError):
    """A command line that cannot be run; the message is for its author."""

    code = ExitCode.USAGE


class PreflightError(CommandError, ValueError):
    """A machine that cannot run the command; the message says what is missing."""

    code = ExitCode.PREFLIGHT


class MemoryExhaustedError(CommandError):
    """The end of a run for lack of memory; the message names the phase and remedies."""

    code = ExitCode.OUT_OF_MEMORY


class WorkerError(CommandError):
    """The failure of a process that this one started; its message and code are passed on."""

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


def refuse(problems: Sequence[str], error: type[Exception]) -> None:
    """Raise the error with all problems, one a line, if there are any."""
    if problems:
        raise error("\n".join(problems))


# Errors of the packages below. One can only be raised once its module is loaded, so nothing is
# imported here. Commands derive theirs from `CommandError`.
ERROR_CODES: tuple[tuple[str, str, ExitCode], ...] = (
    ("lightrft.engines.libraries", "LibraryError", ExitCode.PREFLIGHT),
    ("lightrft.config.files", "FileError", ExitCode.USAGE),
    ("lightrft.config.files", "FolderGoneError", ExitCode.PREFLIGHT),
    ("lightrft.config.options", "ConfigError", ExitCode.USAGE),
    ("lightrft.datasets.types", "DataError", ExitCode.DATA),
    ("lightrft.rewards.types", "RewardError", ExitCode.REWARD),
    ("lightrft.engines.hf.forward", "CacheRefusedError", ExitCode.USAGE),
    ("lightrft.models.loading", "ModelLoadError", ExitCode.USAGE),
    ("lightrft.models.head", "HeadRefusedError", ExitCode.USAGE),
    ("lightrft.models.types", "LayoutRefusedError", ExitCode.USAGE),
    ("lightrft.strategy.distributed.process_end", "CheckpointError", ExitCode.USAGE),
    ("lightrft.strategy.distributed.network", "NetworkError", ExitCode.PREFLIGHT),
    ("lightrft.strategy.weight_sync.verification", "WeightSyncError", ExitCode.VERIFICATION),
    ("lightrft.strategy.distributed.process_end", "NumericsError", ExitCode.NUMERICS),
    ("lightrft.stages.parity_limits", "ParityError", ExitCode.VERIFICATION),
    ("lightrft.experience.ledger_gate", "LedgerError", ExitCode.VERIFICATION),
    ("lightrft.experience.teachers", "TeacherError", ExitCode.REWARD),
    ("lightrft.reporting.trackers.best_effort", "TrackerError", ExitCode.PREFLIGHT),
    ("lightrft.strategy.distributed.process_end", "RunStoppedError", ExitCode.STOPPED),
)
MAX_ERROR_CHARACTERS = 20_000
LAUNCHED_BY_LIGHTRFT = "LIGHTRFT_LAUNCHED"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A failing disk, or a file system of another machine that is gone.
_LOST_DISK = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENOTCONN, errno.EROFS)
_NOT_POSSIBLE_HERE = (
    *_FULL_DISK,
    *_LOST_DISK,
    errno.EACCES,
    errno.EPERM,
    errno.EADDRINUSE,
)
# Formats of the system's error number by Python and safetensors.
_ERROR_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "not enough memory",
    "can't start new thread",
)
# Messages of gloo and NCCL when a peer did not come in time.
_TIMED_OUT = ("Timed out waiting", "timed out in", "Watchdog caught collective operation timeout")
# Messages of gloo, NCCL and the store when another process is gone.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "failed to recv",
    "recvvalue failed",
    "remote process exited",
    "connectfullmesh failed",
    "ended because another rank failed",
)
# Errors that may concern a collective: users and services do not write their texts.
_OF_COLLECTIVES = ("CheckpointError", "WeightSyncError", "RuntimeError")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once: an error may be its cause itself."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = current.__cause__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error, or a cause of it, reports exhausted memory."""
    rewards = sys.modules.get("lightrft.rewards.types")
    if rewards is not None and isinstance(error, rewards.RewardError):
        return False  # in another process, where no option of the trainer helps
    return any(is_memory_error(link) for link in chain(error))


def is_memory_error(error: BaseException) -> bool:
    """Return whether an exception itself, not a cause of it, reports exhausted memory."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    if type(error).__module__ == "lightrft.rewards.types":
        return False  # a user's function describes its separate process
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _NO_MEMORY)


def memory_report(error: BaseException, phase: str | None, config: "TrainConfig | None") -> str:
    """Return the exhausted memory, and with options the remedies; see `tools.memory_advice`."""
    report = load_reference("lightrft.tools.memory_advice:memory_report", kind="memory advice")
    return cast("Callable[..., str]", report)(error, phase, config)


def exit_code_of(error: BaseException) -> int:
    """Return the code of an exception: by its class, or by the first cause with a code."""
    for link in chain(error):
        if _lost_peer(link) is not None:
            break
        code = _class_code(link) or _system_code(link)
        if code is None and isinstance(link, RuntimeError):
            code = ExitCode.DEADLINE if any(text in str(link) for text in _TIMED_OUT) else None
        if code is None and is_out_of_memory(link):
            code = ExitCode.OUT_OF_MEMORY
        if code is not None:
            return code
    return ExitCode.UNEXPECTED


def words_of_lost_peer(text: str) -> str | None:
    """Return the words of a text that report a lost process; None if there are none."""
    return next((words for words in _LOST_PEER if words in text.lower()), None)


def _lost_peer(error: BaseException) -> str | None:
    """Return such words of an exception, if it concerns a collective."""
    kind = type(error)
    tells = kind.__name__ in _OF_COLLECTIVES or kind.__module__.startswith("torch.")
    return words_of_lost_peer(str(error)) if tells else None


def _class_code(error: BaseException) -> int | None:
    """Return the code of an error whose class has one."""
    if isinstance(error, WorkerError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    known = (
        code
        for module, name, code in ERROR_CODES
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name))
    )
    code = error.code if isinstance(error, CommandError) else next(known, None)
    is_here = code is not None and (_tells_of_disk(error, code) or _lacks_extra(error))
    return ExitCode.PREFLIGHT if is_here else code


def _lacks_extra(error: BaseException) -> bool:
    """Return whether it names the extra with a package that could not be imported."""
    return "lightrft[" in str(error) and any(isinstance(e, ImportError) for e in chain(error))


def _system_code(error: BaseException) -> int | None:
    """Return the code of a Python error: of the system, the machine or arithmetic."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ExitCode.USAGE
    if isinstance(error, FloatingPointError):  # an engine's: of finite weights
        return ExitCode.NUMERICS
    is_here = isinstance(error, OSError) and error.errno in _NOT_POSSIBLE_HERE
    is_full = type(error).__name__ == "SafetensorError" and _tells_of_disk(error)
    return ExitCode.PREFLIGHT if is_here or is_full or _lacks_extra(error) else None


def _tells_of_disk(error: BaseException, code: int = ExitCode.USAGE) -> bool:
    """Return whether its text or its cause has the number of a disk that is full or fails.

    A failure of another rank comes as that rank's text; a service's message concerns that service's
    disk.
    """
    numbers = {int(a or b) for a, b in _ERROR_NUMBER.findall(str(error))}
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno is not None:
        numbers.add(cause.errno)
    is_of_files = code in (ExitCode.USAGE, ExitCode.DATA)
    return bool(numbers & {*_FULL_DISK, *(_LOST_DISK if is_of_files else ())})


def describe(error: BaseException) -> str:
    """Return the text for the user: the message alone if they can fix it."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    code = exit_code_of(error)
    if code == ExitCode.UNEXPECTED and not isinstance(error, WorkerError):
        for link in chain(error):
            if isinstance(link, PeerFailedError):
                return f"ended because another rank failed: {link}"
            if words := _lost_peer(link):
                rank = os.environ.get("RANK", "0")
                phase = _phase_of(error)
                where = "" if phase is None else f" in phase {phase!r}"
                return f"ended because another rank failed: rank {rank} lost it{where}: {words}"
        return "".join(traceback.format_exception(error)).rstrip()
    if code == ExitCode.OUT_OF_MEMORY and not isinstance(error, MemoryExhaustedError):
        return memory_report(error, _phase_of(error), None)
    if code == ExitCode.DEADLINE:
        rank = os.environ.get("RANK", "0")
        return (
            f"deadline: rank {rank} waited in vain for a peer in phase {_phase_of(error)!r}: "
            f"{str(error).strip().splitlines()[0]}"
        )
    return str(error)


def _phase_of(error: BaseException) -> str | None:
    deadlines = sys.modules.get("lightrft.strategy.distributed.deadlines")
    if deadlines is None:
        return None
    name: str | None = deadlines.phase_of(error)
    return name


def _skip_last_collection() -> None:
    """Keep Python from collecting garbage at its end: with torch and transformers, a second."""
    # Triton from 3.9 on would print a page about each object that is left.
    if "triton" not in sys.modules:
        gc.freeze()


def run_guarded(program: str, body: Callable[[], int]) -> int:
    """Run `body`; an exception is reported once, on standard error, and becomes its exit code."""
    atexit.register(_skip_last_collection)
    try:
        return body()
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else ExitCode.OK
    except BrokenPipeError:  # the reader of `lightrft ... | head` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary to the shell
        if isinstance(error, ImportError):
            from lightrft.engines.libraries import explained

            error = explained(error)
        code = exit_code_of(error)
        # Parts of the text may come from data, models, reward functions and other machines.
        text = printable(mask_address(describe(error)), limit=MAX_ERROR_CHARACTERS)
        write_error_report(text, code)
        if LAUNCHED_BY_LIGHTRFT not in os.environ:
            rank = os.environ.get("RANK", "0")
            prefix = program if os.environ.get("WORLD_SIZE", "1") == "1" else f"{program}[{rank}]"
            print("\n".join(f"{prefix}: {line}" for line in text.split("\n")), file=sys.stderr)
        return code
