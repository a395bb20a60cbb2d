"""`lightrft rows`: rows for supervised stages, made from the recorded samples of a run."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser
from lightrft.datasets.row_origin import origin_path
from lightrft.reporting.files import CONFIG_FILE, ROLLOUTS_FILE
from lightrft.tools.commands import parser_of
from lightrft.tools.rows.row_choice import CHOICES, FATES, USES
from lightrft.tools.rows.row_file import RowReport, RowRequest, write_rows


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft rows --help`.

    Raises:
        UsageError: The arguments are not valid.
        DataError: The samples cannot be read, or none fits.
    """
    request, path = parse(argv)
    report = write_rows(request, path)
    for line in report_lines(report):
        print(line)
    print(f"wrote {path} and {origin_path(path)}")
    return ExitCode.OK


def report_lines(report: RowReport) -> list[str]:
    """Return lines on the fates of the samples, for people."""
    lines = [f"{report.num_rows} rows of {report.num_prompts} prompts, from:"]
    shown = {"sampled": report.num_sampled, **report.fates}
    width = len(str(report.num_sampled))
    for name, count in shown.items():
        if count or name in ("sampled", "chosen"):
            what = FATES.get(name, "by the run; the sum of all that follow")
            lines.append(f"  {count:>{width}}  {name:<10}  {what}")
    if not report.has_held_out:
        lines.append("the run has no eval_data (eval: --held_out): no prompt is held out")
    return lines


def parse(argv: Sequence[str]) -> tuple[RowRequest, Path]:
    """Return the request and the path of its file.

    Raises:
        UsageError: The arguments are not valid.
    """
    args = build_parser().parse_args(argv)
    folder, path = Path(args.run), Path(args.output)
    name = args.choose or USES[args.use][0]
    if name not in USES[args.use]:
        raise UsageError(f"--choose {name}: rows for {args.use} take {' or '.join(USES[args.use])}")
    choice = CHOICES[name]
    if args.threshold is not None and not choice.uses_threshold:
        raise UsageError(f"--threshold has no effect on --choose {name}: leave it out")
    if not (folder / CONFIG_FILE).is_file():
        raise UsageError(
            f"no run at {folder}: expected the --output_dir of lightrft train, or of lightrft eval "
            "--save_rollouts"
        )
    if not (folder / ROLLOUTS_FILE).is_file():
        raise UsageError(
            f"{folder} has no {ROLLOUTS_FILE}: expected a run of lightrft train, or an evaluation, "
            "with --save_rollouts; a run may be continued with it"
        )
    if path.suffix != ".jsonl" or not path.parent.is_dir():
        raise UsageError(f"--output: got {path}, expected a .jsonl file in a folder that exists")
    if path.exists():
        raise UsageError(f"--output: {path} exists: give a new file")
    most = choice.max_per_prompt if args.max_per_prompt is None else args.max_per_prompt
    threshold = 1.0 if args.threshold is None else args.threshold
    return RowRequest(folder, args.use, name, threshold, most), path


def build_parser() -> Parser:
    """Return the parser of `lightrft rows`."""
    uses = "; ".join(f"for {use} {' or '.join(names)}" for use, names in USES.items())
    return parser_of("rows", {"--for": USES, "--choose": CHOICES}, uses=uses)
