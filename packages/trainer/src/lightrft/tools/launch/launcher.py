"""What the launchers share: the machines they ask for, and the checked options of the run."""

import argparse
from collections.abc import Sequence
from typing import Any

from lightrft.cli.errors import UsageError, refuse
from lightrft.cli.options import Parser, add_number, parse_options
from lightrft.cli.train import build_parser as build_train_parser
from lightrft.config.rules import batch_problems
from lightrft.strategy.config import ConfigError


def launcher_parser(
    name: str, description: str, *, required: str = "", grace_seconds: int, grace: str
) -> Parser:
    """The parser of `lightrft launch NAME`, without the options of the run.

    Args:
        name: Of the launcher.
        description: What it prints.
        required: Options that its usage shows.
        grace_seconds, grace: Between asking the run to stop and ending it; and in words.
    """
    usage = f"lightrft launch {name} --print {required}[OPTIONS] -- [OPTIONS OF lightrft train]"
    parser = Parser(f"launch {name}", description, usage=usage)
    parser.add_argument("--print", action="store_true", help="Print it (the only way).")
    for flag, default, text in (
        ("--nodes", 1, "Nodes."),
        ("--gpus_per_node", 8, "GPUs of a node, one process each."),
        ("--cpus_per_task", 8, "CPU cores of a process."),
        ("--grace_seconds", grace_seconds, grace),
    ):
        add_number(parser, flag, text, default=default)
    parser.add_argument("--job_name", default="lightrft", help="Default: lightrft.")
    return parser


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, example: str, submit: str
) -> tuple[dict[str, Any], Sequence[str]]:
    """The launcher's options, parsed, and those of the run, which stand after "--".

    Args:
        parser: Of the launcher.
        argv: All arguments.
        example: A command that is right.
        submit: Gives what was printed to the scheduler.

    Raises:
        UsageError: Arguments that cannot be read, none after "--", or no --print.
    """
    place = argv.index("--") if "--" in argv else len(argv)
    options = vars(parser.parse_args(argv[:place]))
    if place == len(argv):
        raise UsageError(f"the options of the run are missing: {example}")
    if not options["print"]:
        name = parser.prog.split()[-1]
        raise UsageError(f"lightrft launch {name} only prints: add --print, look, then {submit} it")
    return options, argv[place + 1 :]


def check_run(options: dict[str, Any], arguments: Sequence[str]) -> None:
    """Raises a ConfigError for options of `lightrft train` that these machines cannot run."""
    config, parsed, problems = parse_options(build_train_parser(), arguments)
    if parsed.nproc_per_node != 1:
        problems.append("nproc_per_node: leave it out, one process per GPU is started")
    if not problems:
        problems += batch_problems(config, options["nodes"] * options["gpus_per_node"])
    refuse(problems, ConfigError)
