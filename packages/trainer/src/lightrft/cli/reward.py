"""`lightrft reward`: reward models; processes, signals and files are those of `train`."""

import shlex
import sys
from collections.abc import Sequence

from lightrft.cli.errors import run_guarded
from lightrft.cli.options import Parser
from lightrft.cli.train import StageCommand, next_after_rows, parse_stage, run_stage, stage_parser
from lightrft.config import TrainConfig


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft reward --help`; errors as for `lightrft.cli.sft.run`."""
    return run_stage(
        argv,
        StageCommand(
            "lightrft.cli.reward",
            lambda _: "reward",
            build_parser,
            parse,
            lambda _: None,
            next_commands,
        ),
    )


def next_commands(output_dir: str, model_dir: str) -> str:
    """The place of the trained model, and the commands that come next."""
    model = shlex.quote(model_dir)
    return (
        f"{next_after_rows(output_dir, model_dir)}\n"
        f"         lightrft train --reward_pretrain {model} ..."
    )


def parse(argv: Sequence[str]) -> tuple[TrainConfig, int]:
    """The configuration and the number of processes on this node; see `parse_stage`."""
    return parse_stage(argv, build_parser())


def build_parser(*, lists_all: bool = True) -> Parser:
    """The parser of `lightrft reward`; options that are not given leave no trace.

    Args:
        lists_all: Otherwise it has only the options that most runs set.
    """
    return stage_parser(
        "reward",
        "Train a model that gives answers a score, on pairs of answers or labelled ones.",
        lists_all=lists_all,
    )


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft reward", lambda: run(sys.argv[1:])))
