"""`lightrft report`: one HTML page about a run, finished or not."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode
from lightrft.cli.options import Parser
from lightrft.trainer.reporting.page import write_report


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft report --help`.

    Raises:
        NotARunError: The folder holds no run.
    """
    path = write_report(Path(build_parser().parse_args(argv).run))
    print(f"wrote {path}")
    return ExitCode.OK


def build_parser() -> Parser:
    """The parser of `lightrft report`."""
    parser = Parser(
        "report",
        "Write RUN/report.html: one page with curves, times, samples and options, "
        "which opens from disk without a network. A run that has not ended is fine.",
    )
    parser.add_argument("run", metavar="RUN", help="The --output_dir of a run.")
    return parser
