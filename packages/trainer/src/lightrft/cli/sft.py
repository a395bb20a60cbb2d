"""`lightrft sft`: supervised fine-tuning; processes, signals and files are those of `train`."""

import shlex
import sys
from collections.abc import Sequence

from lightrft.cli.errors import run_guarded
from lightrft.cli.options import Parser, parse_options
from lightrft.cli.train import StageCommand, parse_rows, run_stage, stage_parser
from lightrft.config import TrainConfig


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft sft --help`.

    Raises:
        ConfigError: Options that cannot be run; one line for each problem.
        UsageError: Arguments that cannot be read.
        PreflightError: This machine lacks what the run needs.
        DataError: Rows that cannot be used.
    """
    return run_stage(
        argv,
        StageCommand(
            "lightrft.cli.sft",
            lambda _: "sft",
            build_parser,
            parse,
            lambda _: None,
            next_commands,
        ),
    )


def next_commands(output_dir: str, model_dir: str) -> str:
    """The place of the trained model, and the commands that come next."""
    run, exported = map(shlex.quote, (output_dir, f"{output_dir}_exported"))
    return (
        f"model    {model_dir}\nnext     lightrft report {run}\n"
        f"         lightrft export {run} {exported}"
    )


def parse(argv: Sequence[str]) -> tuple[TrainConfig, int]:
    """The configuration and the number of processes on this node.

    Raises:
        ConfigError: Unknown names, wrong values, missing files; all of them at once.
        UsageError: Arguments that cannot be read.
    """
    return parse_rows(*parse_options(build_parser(), argv))


def build_parser(*, lists_all: bool = True) -> Parser:
    """The parser of `lightrft sft`; options that are not given leave no trace.

    Args:
        lists_all: Otherwise it has only the options that most runs set.
    """
    return stage_parser(
        "sft",
        "Fine-tune a language model on texts, on answers to prompts or on conversations.",
        lists_all=lists_all,
    )


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft sft", lambda: run(sys.argv[1:])))
