"""`lightrft prefer`: learning from preferences; all else is as in `sft`."""

import sys
from collections.abc import Sequence

from lightrft.cli.errors import run_guarded
from lightrft.cli.options import Parser
from lightrft.cli.train import (
    StageCommand,
    next_after_rows,
    parse_stage,
    run_stage,
    stage_parser,
)
from lightrft.config import TrainConfig


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft prefer --help`.

    Raises:
        ConfigError: Options that cannot be run; one line for each problem.
        UsageError: Arguments that cannot be read.
        PreflightError: This machine lacks what the run needs.
        DataError: Rows that cannot be used.
    """
    command = StageCommand(
        "lightrft.cli.prefer",
        lambda _: "prefer",
        build_parser,
        parse,
        lambda _: None,
        next_after_rows,
    )
    return run_stage(argv, command)


def parse(argv: Sequence[str]) -> tuple[TrainConfig, int]:
    """See `parse_stage`."""

    def problems(config: TrainConfig, world_size: int) -> list[str]:
        from lightrft.stages.preference.preference_inputs import preference_problems

        return preference_problems(config, world_size)

    return parse_stage(argv, build_parser(), problems)


def build_parser(*, lists_all: bool = True) -> Parser:
    """The parser of `lightrft prefer`; options that are not given leave no trace.

    Args:
        lists_all: Otherwise it has only the options that most runs set.
    """
    return stage_parser(
        "prefer",
        "Fine-tune a language model on pairs of answers, or on answers that are labelled.",
        lists_all=lists_all,
    )


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft prefer", lambda: run(sys.argv[1:])))
