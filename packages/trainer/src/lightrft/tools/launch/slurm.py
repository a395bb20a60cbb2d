"""`lightrft launch slurm`: the batch script of a run on several nodes, printed for a look."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import UsageError
from lightrft.tools.launch.launcher import check_run, launcher_parser, read_options

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

    options, arguments = read_options(build_parser(), argv, example=EXAMPLE, submit="sbatch")
    if not TIME.match(options["time"]):
        raise UsageError(
            f"--time: got {options['time']!r}, expected for example 8:00:00 or 2-00:00:00"
        )
    for name in ("job_name", "partition", "account"):
        value = options[name]
        if value is not None and not re.fullmatch(r"[\w.,@-]+", value):
            raise UsageError(f"--{name}: got {value!r}, expected letters, digits, . , _ @ and -")
    check_run(options, arguments)
    template = Path(__file__).with_name("slurm.sh.jinja").read_text("utf-8")
    command = shlex.join([sys.executable, "-m", "lightrft.cli.train", *arguments])
    return str(jinja2.Template(template, trim_blocks=True).render(command=command, **options))


def build_parser() -> argparse.ArgumentParser:
    """The parser of `lightrft launch slurm`, without the options of the run."""
    parser = launcher_parser(
        "slurm",
        DESCRIPTION,
        grace_seconds=600,
        grace="Seconds before the end at which the run is asked to stop.",
    )
    parser.add_argument("--time", default="24:00:00", help="Limit of the job. Default: 24:00:00.")
    parser.add_argument("--partition", help="Where to queue.")
    parser.add_argument("--account", help="Who pays.")
    return parser
