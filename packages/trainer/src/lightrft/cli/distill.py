"""`lightrft distill`: `train` where only the teacher teaches, or `sft` with its divergence."""

import sys
from collections.abc import Sequence

from lightrft.cli.errors import run_guarded
from lightrft.cli.options import Parser, parse_options
from lightrft.cli.train import (
    StageCommand,
    check,
    next_after_rows,
    parse_policy,
    parse_rows,
    run_stage,
    stage_parser,
)
from lightrft.config import TrainConfig


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft distill --help`; errors as for `lightrft train`."""
    return run_stage(
        argv,
        StageCommand(
            "lightrft.cli.distill",
            lambda config: config.distillation_stage,
            build_parser,
            parse,
            _check,
            next_after_rows,
        ),
    )


def parse(argv: Sequence[str]) -> tuple[TrainConfig, int]:
    """The configuration and the number of processes on this node; errors as for `train`."""
    config, parsed, problems = parse_options(build_parser(), argv)
    config = config if problems else config.distilled()
    if config.distillation_stage == "policy":
        return parse_policy(config, parsed, problems)
    if not problems:
        from lightrft.cli.preflight import teacher_problems

        problems += teacher_problems(config)
    return parse_rows(config, parsed, problems, "distill")


def _check(config: TrainConfig) -> None:
    if config.distillation_stage == "policy":
        check(config)


def build_parser(*, lists_all: bool = True) -> Parser:
    """The parser of `lightrft distill`; options that are not given leave no trace.

    Args:
        lists_all: Otherwise it has only the options that most runs set.
    """
    return stage_parser(
        "distill",
        "Train a language model towards a teacher, on its own samples or on rows with completions.",
        lists_all=lists_all,
    )


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft distill", lambda: run(sys.argv[1:])))
