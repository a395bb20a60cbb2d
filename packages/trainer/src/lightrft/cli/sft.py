"""`lightrft sft`: supervised fine-tuning; processes, signals and files are those of `train`."""

import sys
from collections.abc import Sequence

from lightrft.cli.errors import run_guarded
from lightrft.cli.options import Parser
from lightrft.cli.train import StageCommand, next_after_rows, parse_stage, run_stage, stage_parser
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
            next_after_rows,
        ),
    )


def parse(argv: Sequence[str]) -> tuple[TrainConfig, int]:
    """The configuration and the number of processes on this node; see `parse_stage`."""
    return parse_stage(argv, build_parser())


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
