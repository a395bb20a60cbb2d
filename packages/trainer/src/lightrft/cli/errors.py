"""Exit codes, and the one place where an exception becomes a line on the terminal and a code."""

import atexit
import errno
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum

from lightrft.cli.memory_advice import is_out_of_memory, memory_report
from lightrft.config.options import mask_address
from lightrft.config.printable import printable
from lightrft.strategy.distributed.error_report import write_error_report


class ExitCode(IntEnum):
    """What the shell sees."""

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


class UsageError(ValueError):
    """The command line cannot be carried out; the message is for its author."""


class PreflightError(ValueError):
    """This machine cannot carry out what was asked; the message says what is missing."""


class MemoryExhaustedError(Exception):
    """A run ended for lack of memory; the message names the phase and remedies."""


class WorkerError(Exception):
    """A process started by this one failed; its message and code are passed on."""

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


def refuse(problems: Sequence[str], error: type[Exception]) -> None:
    """Raise the error with all problems, one a line, if there are any."""
    if problems:
        raise error("\n".join(problems))


# An error of a class can only be raised once its module is loaded, so nothing is imported here.
_CODES: tuple[tuple[str, str, ExitCode], ...] = (
    ("lightrft.cli.errors", "UsageError", ExitCode.USAGE),
    ("lightrft.cli.errors", "PreflightError", ExitCode.PREFLIGHT),
    ("lightrft.cli.errors", "MemoryExhaustedError", ExitCode.OUT_OF_MEMORY),
    ("lightrft.strategy.config", "ConfigError", ExitCode.USAGE),
    ("lightrft.datasets.types", "DataError", ExitCode.DATA),
    ("lightrft.rewards.types", "RewardError", ExitCode.REWARD),
    ("lightrft.models.loading", "ModelLoadError", ExitCode.USAGE),
    ("lightrft.strategy.checkpoints.files", "CheckpointError", ExitCode.USAGE),
    ("lightrft.strategy.distributed.network", "NetworkError", ExitCode.PREFLIGHT),
    ("lightrft.strategy.weight_sync.accounting", "WeightSyncError", ExitCode.VERIFICATION),
    ("lightrft.experience.assemble", "NumericsError", ExitCode.NUMERICS),
    ("lightrft.stages.policy.parity", "ParityError", ExitCode.VERIFICATION),
    ("lightrft.experience.ledger_gate", "LedgerError", ExitCode.VERIFICATION),
    ("lightrft.tools.export.exported_model", "ExportError", ExitCode.VERIFICATION),
    ("lightrft.tools.audit.record", "RecordError", ExitCode.USAGE),
    ("lightrft.reporting.trackers.best_effort", "TrackerError", ExitCode.PREFLIGHT),
    ("lightrft.tools.report.run_data", "NotARunError", ExitCode.USAGE),
    ("lightrft.run.stopping", "RunStoppedError", ExitCode.STOPPED),
)
MAX_ERROR_CHARACTERS = 20_000
LAUNCHED_BY_LIGHTRFT = "LIGHTRFT_LAUNCHED"
_NOT_POSSIBLE_HERE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EADDRINUSE,
)
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How Python and safetensors write the system's error number.
_ERROR_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
# What gloo and NCCL say when a peer did not come in time.
_TIMED_OUT = ("Timed out waiting", "timed out in", "Watchdog caught collective operation timeout")


def exit_code_of(error: BaseException) -> int:
    """The code of an exception: that of its class, or of the first cause that has one."""
    if isinstance(error, WorkerError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    for module, name, code in _CODES:
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
            return ExitCode.PREFLIGHT if _tells_of_full_disk(error) else code
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ExitCode.USAGE
    if isinstance(error, OSError) and error.errno in _NOT_POSSIBLE_HERE:
        return ExitCode.PREFLIGHT
    if type(error).__name__ == "SafetensorError" and _tells_of_full_disk(error):
        return ExitCode.PREFLIGHT
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _TIMED_OUT):
        return ExitCode.DEADLINE
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.UNEXPECTED if error.__cause__ is None else exit_code_of(error.__cause__)


def _tells_of_full_disk(error: BaseException) -> bool:
    """Whether its text has the number: what failed on another rank comes as that rank's text."""
    numbers = {int(a or b) for a, b in _ERROR_NUMBER.findall(str(error))}
    return bool(numbers & set(_FULL_DISK))


def describe(error: BaseException) -> str:
    """What the user reads: the message alone where it is theirs to fix, else with the traceback."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    code = exit_code_of(error)
    if code == ExitCode.UNEXPECTED and not isinstance(error, WorkerError):
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


def run_guarded(program: str, body: Callable[[], int]) -> int:
    """Run `body`; an exception is reported once, on standard error, and becomes its exit code."""
    # At its end Python looks for garbage among all objects: with torch and transformers, a second.
    atexit.register(gc.freeze)
    try:
        return body()
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else ExitCode.OK
    except BrokenPipeError:  # the reader of `lightrft ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary to the shell
        code = exit_code_of(error)
        # Parts of it may come from data, models, reward functions and other machines.
        text = printable(mask_address(describe(error)), limit=MAX_ERROR_CHARACTERS)
        write_error_report(text, code)
        if LAUNCHED_BY_LIGHTRFT not in os.environ:
            rank = os.environ.get("RANK", "0")
            prefix = program if os.environ.get("WORLD_SIZE", "1") == "1" else f"{program}[{rank}]"
            print("\n".join(f"{prefix}: {line}" for line in text.split("\n")), file=sys.stderr)
        return code
