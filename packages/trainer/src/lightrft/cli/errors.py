"""Exit codes, and the one place where an exception becomes a line on the terminal and a code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
    STOPPED = 75
    INTERRUPTED = 130
    TERMINATED = 143


class UsageError(ValueError):
    """The command line cannot be carried out; the message is for its author."""


class WorkerError(Exception):
    """A process started by this one failed; its message and code are passed on."""

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


# An error of a class can only be raised once its module is loaded, so nothing is imported here.
_CODES: tuple[tuple[str, str, ExitCode], ...] = (
    ("lightrft.cli.errors", "UsageError", ExitCode.USAGE),
    ("lightrft.strategy.config", "ConfigError", ExitCode.USAGE),
    ("lightrft.datasets.errors", "DataError", ExitCode.DATA),
    ("lightrft.rewards.errors", "RewardError", ExitCode.REWARD),
    ("lightrft.models.loading", "ModelLoadError", ExitCode.USAGE),
    ("lightrft.strategy.checkpoint_manifest", "CheckpointError", ExitCode.USAGE),
    ("lightrft.strategy.weight_accounting", "WeightSyncError", ExitCode.VERIFICATION),
    ("lightrft.trainer.parity", "ParityError", ExitCode.VERIFICATION),
    ("lightrft.trainer.export", "ExportError", ExitCode.VERIFICATION),
    ("lightrft.trainer.stopping", "RunStoppedError", ExitCode.STOPPED),
)
LAUNCHED_BY_LIGHTRFT = "LIGHTRFT_LAUNCHED"


def exit_code_of(error: BaseException) -> int:
    """The code of an exception: that of its class, or of the first cause that has one."""
    if isinstance(error, WorkerError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    for module, name, code in _CODES:
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
            return code
    return ExitCode.UNEXPECTED if error.__cause__ is None else exit_code_of(error.__cause__)


def describe(error: BaseException) -> str:
    """What the user reads: the message alone where it is his to mend, else with the traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if exit_code_of(error) == ExitCode.UNEXPECTED and not isinstance(error, WorkerError):
        return "".join(traceback.format_exception(error)).rstrip()
    return str(error)


def run_guarded(program: str, body: Callable[[], int]) -> int:
    """Run `body`; an exception is reported once, on standard error, and becomes its exit code."""
    try:
        return body()
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else ExitCode.OK
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary to the shell
        code = exit_code_of(error)
        text = describe(error)
        _write_error_file(text, code)
        if LAUNCHED_BY_LIGHTRFT not in os.environ:
            rank = os.environ.get("RANK", "0")
            prefix = program if os.environ.get("WORLD_SIZE", "1") == "1" else f"{program}[{rank}]"
            print("\n".join(f"{prefix}: {line}" for line in text.split("\n")), file=sys.stderr)
        return code


def _write_error_file(text: str, code: int) -> None:
    """Leave the error where torch's elastic launcher looks for it, in its format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    message = {"message": text, "extraInfo": extra, "errorCode": code, "seconds": now}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as stream:
        json.dump({"message": message}, stream)
