"""`lightrft report`: one HTML page about a run, finished or not, or about several."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser
from lightrft.config.toml import write_whole
from lightrft.reporting.metric_table import STAGES
from lightrft.tools.commands import parser_of
from lightrft.tools.report.charts import Chart, library_address, write_library
from lightrft.tools.report.page import (
    CURVES,
    STATUS_WORDS,
    fill_template,
    run_facts,
    write_report,
)
from lightrft.tools.report.run_data import RunData, read_run

TEMPLATE = "comparison.html.jinja"
FILE = "comparison.html"
# Six colours, each once as a line and once dashed.
MAX_RUNS = 12
# Facts of a single run that are worth comparing with those of others.
FACTS = ("steps", "time in steps", "processes", "eval/reward", "reward", "verdict", "versions")


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
    place = Path(arguments.output or folders[0] / FILE)
    if len(folders) == 1:
        path = write_report(folders[0], library)
    else:
        place.absolute().parent.mkdir(parents=True, exist_ok=True)
        path = write_comparison(folders, place, library)
    print(f"wrote {path}")
    return ExitCode.OK


def build_parser() -> Parser:
    """Return the parser of `lightrft report`."""
    return parser_of("report", file=FILE)


def write_comparison(folders: Sequence[Path], path: Path, library: Path | None = None) -> Path:
    """Write the page about up to `MAX_RUNS` runs, which appears whole or not at all.

    Args:
        folders: Folders of the runs.
        path: Path of the page.
        library: Path of the chart library, for a page that does not hold it.

    Raises:
        NotARunError: A folder holds no run.
    """
    address = None if library is None else library_address(library, path.parent)
    write_whole(path, render_comparison(folders, address=address))
    return path


def render_comparison(folders: Sequence[Path], *, address: str | None = None) -> str:
    """Return the HTML text about the runs in `folders`; see `write_comparison`."""
    runs = dict(zip(distinct_names(folders), map(read_run, folders), strict=True))
    charts = _charts(runs)
    facts = {name: dict(run_facts(run)) for name, run in runs.items()}
    return fill_template(
        TEMPLATE,
        charts,
        library_address=address,
        runs=runs,
        status=STATUS_WORDS,
        facts=[
            (fact, [facts[name].get(fact, "") for name in runs])
            for fact in FACTS
            if any(fact in run for run in facts.values())
        ],
        curves=charts,
        options=differing_options(runs),
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, with as much of their paths as distinguishes them."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]} ({number})" for number, part in enumerate(parts, 1)]


def differing_options(runs: Mapping[str, RunData]) -> list[tuple[str, list[str]]]:
    """Return the options that differ between runs, with their value in each ("" if unknown)."""
    values = [{option.name: option.value for option in run.options} for run in runs.values()]
    names = sorted({name for options in values for name in options})
    rows = [(name, [options.get(name, "") for options in values]) for name in names]
    return [(name, row) for name, row in rows if len(set(row)) > 1 and name != "output_dir"]


def _charts(runs: Mapping[str, RunData]) -> list[Chart]:
    """Return a chart for each metric that a run has, with one line per run that has it."""
    metrics = [(title, name, len(names) > 1) for title, names in CURVES.items() for name in names]
    metrics += [(f"Seconds: {stage}", f"{stage}_seconds", False) for stage in STAGES]
    charts = []
    for title, metric, is_shared in metrics:
        # Empty where a run has no values: its colour stays taken.
        series = {name: run.points(metric) for name, run in runs.items()}
        if any(value is not None for points in series.values() for _, value in points):
            shown = f"{title}: {metric}" if is_shared else title
            charts.append(Chart(shown, "runs", series, metric=metric))
    return charts
