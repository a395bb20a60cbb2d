"""`lightrft launch slurm`: prints a batch script that starts a run on several nodes."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import parse_options
from lightrft.cli.train import build_parser as build_train_parser
from lightrft.config import ConfigError
from lightrft.config.train_config import launch_problems
from lightrft.tools.commands import parser_of

EXAMPLE = "lightrft launch slurm --print --nodes 2 --gpus_per_node 8 -- --config run.toml"
TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}")
WORD = re.compile(r"[\w.,@-]+")


def build_parsers() -> list[argparse.ArgumentParser]:
    """Return the parser of the one action."""
    return [parser_of("launch slurm")]


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft launch slurm --help`.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(f"usage: lightrft launch slurm ...\n\nslurm: {EXAMPLE}")
        return ExitCode.OK
    if name != "slurm":
        got = f"got {name!r}" if name else "nothing was given"
        raise UsageError(f"lightrft launch: {got}, expected slurm: {EXAMPLE}")
    print(script(argv[1:]))
    return ExitCode.OK


def script(argv: Sequence[str]) -> str:
    """Return the text of the batch script, from arguments and options that have been checked.

    Raises:
        UsageError: Arguments that cannot be read, none after "--", or no --print.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    import jinja2

    place = argv.index("--") if "--" in argv else len(argv)
    options, arguments = vars(parser_of("launch slurm").parse_args(argv[:place])), argv[place + 1 :]
    if place == len(argv):
        raise UsageError(f"the options of the run are missing: {EXAMPLE}")
    if not options["print"]:
        raise UsageError("lightrft launch slurm only prints: add --print, look, then sbatch it")
    check_form(options, ("time",), TIME, "for example 8:00:00 or 2-00:00:00")
    check_form(
        options, ("job_name", "partition", "account"), WORD, "letters, digits, . , _ @ and -"
    )
    check_run(options["nodes"] * options["gpus_per_node"], arguments)
    template = Path(__file__).with_name("slurm.sh.jinja").read_text("utf-8")
    command = shlex.join([sys.executable, "-m", "lightrft.cli.train", *arguments])
    return str(jinja2.Template(template, trim_blocks=True).render(command=command, **options))


def check_form(
    options: Mapping[str, str | None], names: Sequence[str], form: re.Pattern[str], expected: str
) -> None:
    """Raise a UsageError for a text of another form."""
    for name in names:
        value = options[name]
        if value is not None and not form.fullmatch(value):
            raise UsageError(f"--{name}: got {value!r}, expected {expected}")


def check_run(world_size: int, arguments: Sequence[str]) -> None:
    """Raise a ConfigError for options of `lightrft train` that so many ranks cannot run."""
    config, parsed, problems = parse_options(build_train_parser(), arguments)
    if parsed.nproc_per_node != 1:
        problems.append("nproc_per_node: leave it out, one process per GPU is started")
    if not problems:
        problems += launch_problems(config.overlapped(world_size), world_size)
    refuse(problems, ConfigError)
