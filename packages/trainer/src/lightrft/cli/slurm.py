"""`lightrft launch slurm`: the batch script of a run on several nodes, printed for a look."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrft.cli.errors import UsageError, refuse
from lightrft.cli.options import Parser, add_number, parse_options
from lightrft.cli.train import build_parser as build_train_parser
from lightrft.config.rules import batch_problems
from lightrft.strategy.config import ConfigError

DESCRIPTION = """\
Print a Slurm batch script for one run: one process per GPU, started by srun, so that signals and
exit codes pass through. Everything after -- are options of lightrft train, which are checked first.
A run that is stopped before its time is over (exit code 75) is queued again and continues.
"""
EXAMPLE = "lightrft launch slurm --print --nodes 2 --gpus_per_node 8 -- --config run.toml"
TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}\Z")


def script(argv: Sequence[str]) -> str:
    """The text of the batch script, of arguments and options that have been checked.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    import jinja2

    options, arguments = split_arguments(build_parser(), argv, EXAMPLE)
    if not options["print"]:
        raise UsageError("lightrft launch slurm only prints: add --print, look, then sbatch it")
    if not TIME.match(options["time"]):
        raise UsageError(
            f"--time: got {options['time']!r}, expected for example 8:00:00 or 2-00:00:00"
        )
    for name in ("job_name", "partition", "account"):
        value = options[name]
        if value is not None and not re.fullmatch(r"[\w.,@-]+", value):
            raise UsageError(f"--{name}: got {value!r}, expected letters, digits, . , _ @ and -")
    check_run(arguments, world_size=options["nodes"] * options["gpus_per_node"])
    template = Path(__file__).with_name("slurm.sh.jinja").read_text("utf-8")
    command = shlex.join([sys.executable, "-m", "lightrft.cli.train", *arguments])
    return str(jinja2.Template(template, trim_blocks=True).render(command=command, **options))


def split_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], example: str
) -> tuple[dict[str, Any], Sequence[str]]:
    """The launcher's options, parsed, and those of the run, which stand after "--".

    Raises:
        UsageError: Arguments that cannot be read, or none after "--".
    """
    place = argv.index("--") if "--" in argv else len(argv)
    options = vars(parser.parse_args(argv[:place]))
    if place == len(argv):
        raise UsageError(f"the options of the run are missing: {example}")
    return options, argv[place + 1 :]


def check_run(arguments: Sequence[str], *, world_size: int) -> None:
    """Raises a ConfigError for options of `lightrft train` that so many processes cannot run."""
    config, parsed, problems = parse_options(build_train_parser(), arguments)
    if parsed.nproc_per_node != 1:
        problems.append("nproc_per_node: leave it out, one process per GPU is started")
    if not problems:
        problems += batch_problems(config, world_size)
    refuse(problems, ConfigError)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `lightrft launch slurm`, without the options of the run."""
    parser = Parser(
        "launch slurm",
        DESCRIPTION,
        usage="lightrft launch slurm --print [OPTIONS] -- [OPTIONS OF lightrft train]",
    )
    parser.add_argument("--print", action="store_true", help="Print the script (the only way).")
    for flag, default, text in (
        ("--nodes", 1, "Nodes."),
        ("--gpus_per_node", 8, "GPUs of a node, one process each."),
        ("--cpus_per_task", 8, "CPU cores of a process."),
        ("--grace_seconds", 600, "Seconds before the end at which the run is asked to stop."),
    ):
        add_number(parser, flag, text, default=default)
    parser.add_argument("--time", default="24:00:00", help="Limit of the job. Default: 24:00:00.")
    parser.add_argument("--job_name", default="lightrft", help="Default: lightrft.")
    parser.add_argument("--partition", help="Where to queue.")
    parser.add_argument("--account", help="Who pays.")
    return parser
