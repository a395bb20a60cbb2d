"""`lightrft report`: one HTML page about a run, finished or not, or about several."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser
from lightrft.reporting.start_bar import end_start_bar
from lightrft.tools.report.charts import write_library
from lightrft.tools.report.comparison import (
    FILE as COMPARISON_FILE,
    MAX_RUNS,
    write_comparison,
)
from lightrft.tools.report.page import write_report
from lightrft.tools.report.watch import ADDRESS, serving


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft report --help`.

    Raises:
        NotARunError: A folder holds no run.
        UsageError: Too many runs, or --output for one; the port cannot be used, or is given
            without --watch.
    """
    arguments = build_parser().parse_args(argv)
    folders = [Path(name) for name in arguments.run]
    if len(folders) > MAX_RUNS:
        raise UsageError(f"report compares up to {MAX_RUNS} runs, got {len(folders)}: name fewer")
    if arguments.watch and arguments.shared:
        raise UsageError("--shared is for pages that are written: leave it out, or --watch")
    if arguments.watch:
        return _watch(folders, arguments.port)
    if arguments.port:
        raise UsageError("--port is for --watch: add it, or leave --port out")
    if arguments.output and len(folders) == 1:
        raise UsageError("--output is for a page about several runs: name them, or leave it out")
    library = write_library(folders[0].resolve().parent) if arguments.shared else None
    if len(folders) == 1:
        path = write_report(folders[0], library)
    else:
        place = Path(arguments.output or folders[0] / COMPARISON_FILE)
        place.absolute().parent.mkdir(parents=True, exist_ok=True)
        path = write_comparison(folders, place, library)
    print(f"wrote {path}")
    return ExitCode.OK


def _watch(folders: Sequence[Path], port: int) -> int:
    """Serves the page until Ctrl-C."""
    try:
        with serving(folders, port=port) as server:
            shown = ", ".join(map(str, folders))
            print(f"http://{ADDRESS}:{server.server_port} follows {shown}; Ctrl-C ends", flush=True)
            end_start_bar()
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    return ExitCode.OK


def build_parser() -> Parser:
    """The parser of `lightrft report`."""
    parser = Parser(
        "report",
        "Write RUN/report.html: one page with curves, times, samples and options, "
        "which opens from disk without a network. A run that has not ended is fine. "
        f"Of several runs RUN/{COMPARISON_FILE} of the first shows the curves together, and the "
        "options that differ.",
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help="The --output_dir of a run.")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="Serve the page to this machine alone, and follow the runs until Ctrl-C.",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="Keep the chart library (about 5 MB) once, in the folder that holds RUN, in place of "
        "2 MB in each page; page and file move together.",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help=f"Page about several runs; unset is {COMPARISON_FILE} in the folder of the first.",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="Of --watch; 0 takes a free one."
    )
    return parser
