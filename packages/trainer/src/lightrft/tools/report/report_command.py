"""`lightrft report`: one HTML page about a run, finished or not, or about several."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser
from lightrft.config.printable import one_line
from lightrft.reporting.files import (
    CONFIG_FILE,
    EVENTS_FILE,
    START_FILE,
    STEP_FILES,
    SUMMARY_FILE,
)
from lightrft.reporting.start_bar import end_start_bar
from lightrft.tools.commands import parser_of
from lightrft.tools.report.charts import write_library
from lightrft.tools.report.comparison import (
    FILE as COMPARISON_FILE,
    MAX_RUNS,
    write_comparison,
)
from lightrft.tools.report.page import write_report

_WATCHED = (CONFIG_FILE, EVENTS_FILE, START_FILE, SUMMARY_FILE, *STEP_FILES)
LOOK_SECONDS, QUIET_CHECK_SECONDS = 2.0, 300.0


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft report --help`.

    Raises:
        NotARunError: A folder holds no run.
        UsageError: Too many runs, or --output for one.
    """
    arguments = build_parser().parse_args(argv)
    folders = [Path(name) for name in arguments.run]
    if len(folders) > MAX_RUNS:
        raise UsageError(f"report compares up to {MAX_RUNS} runs, got {len(folders)}: name fewer")
    if arguments.output and len(folders) == 1:
        raise UsageError("--output is for a page about several runs: name them, or leave it out")
    library = write_library(folders[0].resolve().parent) if arguments.shared else None
    place = Path(arguments.output or folders[0] / COMPARISON_FILE)

    def write(*, follows: bool = False) -> Path:
        if len(folders) == 1:
            return write_report(folders[0], library, follows=follows)
        place.absolute().parent.mkdir(parents=True, exist_ok=True)
        return write_comparison(folders, place, library, follows=follows)

    if arguments.watch:
        follow(folders, write)
    print(f"wrote {write()}")
    return ExitCode.OK


def follow(folders: Sequence[Path], write: Callable[..., Path]) -> None:
    """Write a page anew when a file of the runs has changed, until Ctrl-C."""
    before: list[float] = []
    messages: set[str] = set()
    files = [folder / name for folder in folders for name in _WATCHED]
    with suppress(KeyboardInterrupt):
        while True:
            try:
                # A run that writes nothing becomes one that has crashed.
                now = [time.time() // QUIET_CHECK_SECONDS]
                now += [file.stat().st_mtime for file in files if file.is_file()]
                if now != before:
                    path = write(follows=True)
                    if not before:
                        print(f"open {path}: it follows the runs; Ctrl-C ends", flush=True)
                        end_start_bar()
                    before = now
            except (UsageError, OSError) as error:  # a run that was removed meanwhile
                if not before:
                    raise
                message = one_line(str(error))
                if message not in messages:
                    print(message, file=sys.stderr, flush=True)
                    messages.add(message)
            time.sleep(LOOK_SECONDS)


def build_parser() -> Parser:
    """Return the parser of `lightrft report`."""
    return parser_of("report", file=COMPARISON_FILE)
