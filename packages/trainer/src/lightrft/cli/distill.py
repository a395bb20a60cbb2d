"""`lightrft distill`: `train` without an advantage of rewards: the teacher's alone teaches."""

import sys
from collections.abc import Sequence

from lightrft.cli.errors import run_guarded
from lightrft.cli.options import Parser
from lightrft.cli.train import (
    StageCommand,
    check,
    next_commands,
    parse_policy,
    run_stage,
    stage_parser,
)
from lightrft.config import TrainConfig


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft distill --help`; errors as for `lightrft train`."""
    return run_stage(
        argv,
        StageCommand("lightrft.cli.distill", "policy", build_parser, parse, check, next_commands),
    )


def parse(argv: Sequence[str]) -> tuple[TrainConfig, int]:
    """The configuration and the number of processes on this node; errors as for `train`."""
    return parse_policy(build_parser(), argv, TrainConfig.distilled)


def build_parser(*, lists_all: bool = True) -> Parser:
    """The parser of `lightrft distill`; options that are not given leave no trace.

    Args:
        lists_all: Otherwise it has only the options that most runs set.
    """
    return stage_parser(
        "distill",
        "Train a language model on its own samples towards a teacher; rewards are reported only.",
        lists_all=lists_all,
    )


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft distill", lambda: run(sys.argv[1:])))
