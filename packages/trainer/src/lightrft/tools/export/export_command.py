"""`lightrft export`: the final model of a run, checked."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser
from lightrft.tools.init_model_command import require_empty

# Of scores: divided by their deviation; also less their mean.
WAYS = ("deviation", "standard")


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft export --help`.

    Raises:
        UsageError: No such folder, or the target is not empty.
        NotARunError: No final model.
    """
    options = build_parser().parse_args(argv)
    folder, directory = Path(options.run), Path(options.directory)
    require_empty(directory)
    if not folder.is_dir():
        raise UsageError(f"no run at {folder}: expected the --output_dir of lightrft train")

    from lightrft.tools.export.exported_model import export_model

    hide_progress_bars()
    report = export_model(folder, directory, normalize_score=options.normalize_score)
    print(
        f"wrote {report.num_parameters} {report.dtype} parameters to {report.directory}; read "
        f"back: weights equal, logits of one prompt within {report.max_logit_difference:.2g}"
    )
    return ExitCode.OK


def build_parser() -> Parser:
    """The parser of `lightrft export`."""
    parser = Parser(
        "export",
        "Write the final model of a run as a Hugging Face checkpoint (safetensors, "
        "tokenizer, model card), read it back, and compare weights and logits.",
    )
    parser.add_argument("run", metavar="RUN", help="The --output_dir of a run that has ended.")
    parser.add_argument("directory", metavar="DIR", help="Where to write it: new or empty.")
    parser.add_argument(
        "--normalize_score",
        choices=WAYS,
        help="Of a reward model: divide its scores by their deviation on training rows, and with "
        "standard also subtract their mean, where the model has a bias; unset changes nothing.",
    )
    return parser
