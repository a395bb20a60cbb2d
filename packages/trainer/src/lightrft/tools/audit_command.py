"""`lightrft audit`: a second opinion on one step of a run."""

import json
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft audit --help`.

    Raises:
        RecordError: The record of the step is missing or damaged.
    """
    args = build_parser().parse_args(argv)
    # Imported here because it imports transformers.
    from lightrft.tools.audit.report import as_table, audit_step

    reference = None if args.reference is None else Path(args.reference)
    hide_progress_bars()
    report = audit_step(Path(args.run), args.step, reference=reference)
    print(json.dumps(report.to_json(), indent=2) if args.json else as_table(report))
    return ExitCode.OK if report.first_difference is None else ExitCode.VERIFICATION


def build_parser() -> Parser:
    """Build the parser of `lightrft audit`."""
    parser = Parser(
        "audit",
        "Recompute one step of a run in float64 by an independent program, from its samples and "
        "rewards, its options, and the weights before it; compare with what the run computed and "
        "with the weights after it. The run records steps with --audit_every K. Exit code 8: they "
        "differ; the last line says where first.",
    )
    parser.add_argument("run", metavar="RUN", help="The --output_dir of a run.")
    parser.add_argument(
        "--step", type=int, help="A recorded rollout step; unset is the newest one."
    )
    parser.add_argument(
        "--reference",
        metavar="FOLDER",
        help="The reference model, if the run's --pretrain is not there any more; of distillation "
        "on rows the teacher.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    return parser
