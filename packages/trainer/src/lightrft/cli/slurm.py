"""`lightrft launch slurm`: the batch script of a run on several nodes, printed for a look."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser, at_least, merge_options, normalise, unknown_flags
from lightrft.cli.train import build_parser as build_train_parser
from lightrft.config.rules import batch_problems
from lightrft.strategy.config import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DESCRIPTION = """\
Print a Slurm batch script for one run: one process per GPU, started by srun, so that signals and
exit codes pass through. Everything after -- are options of lightrft train, which are checked first.
A run that is stopped before its time is over (exit code 75) is queued again and continues.
"""
EXAMPLE = "lightrft launch slurm --print --nodes 2 --gpus_per_node 8 -- --config run.toml"
TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}\Z")
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus_per_node}
#SBATCH --gpus-per-node={gpus_per_node}
#SBATCH --cpus-per-task={cpus_per_task}
#SBATCH --time={time}
#SBATCH --output={name}_%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# {grace_seconds} s before the end every process gets SIGTERM: it writes a checkpoint, exit code 75.
#SBATCH --signal=TERM@{grace_seconds}
{further}set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# Two jobs on one node must not meet on one port.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}"

# One process per GPU; a process that fails ends all others.
code=0
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
  exec "$@"
' lightrft {command} || code=$?

if [ "$code" = 75 ]; then
  echo "stopped with a checkpoint: queued again, the same command continues"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What Slurm is asked for.

    Args:
        name: Of the job and its log.
        nodes, gpus_per_node, cpus_per_task: Its machines; one task per GPU.
        time: Limit, as Slurm writes it.
        grace_seconds: Time for the last checkpoint.
        partition, account: Where to queue; None leaves them to Slurm.
        arguments: Of `lightrft train`.
    """

    name: str
    nodes: int
    gpus_per_node: int
    cpus_per_task: int
    time: str
    grace_seconds: int
    partition: str | None
    account: str | None
    arguments: tuple[str, ...]


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft launch slurm --help`.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    if not argv or argv[0] not in ("slurm", "-h", "--help"):
        raise UsageError(f"lightrft launch knows one action: {EXAMPLE}")
    print(render(parse(["--help"] if argv[0] != "slurm" else argv[1:])), end="")
    return ExitCode.OK


def parse(argv: Sequence[str]) -> Job:
    """The job, with checked options of the run.

    Raises:
        UsageError, ConfigError: See `run`.
    """
    own, separator, arguments = _split(argv)
    options = build_parser().parse_args(own)
    if not separator:
        raise UsageError(f"the options of the run are missing: {EXAMPLE}")
    if not options.print:
        raise UsageError("lightrft launch slurm only prints: add --print, look, then sbatch it")
    if not TIME.match(options.time):
        raise UsageError(
            f"--time: got {options.time!r}, expected for example 8:00:00 or 2-00:00:00"
        )
    for flag, value in (("--job_name", options.job_name), ("--partition", options.partition),
                        ("--account", options.account)):  # fmt: skip
        if value is not None and not re.fullmatch(r"[\w.,@-]+", value):
            raise UsageError(f"{flag}: got {value!r}, expected letters, digits, . , _ @ and -")
    _check(arguments, world_size=options.nodes * options.gpus_per_node)
    return Job(
        name=options.job_name,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        cpus_per_task=options.cpus_per_task,
        time=options.time,
        grace_seconds=options.grace_seconds,
        partition=options.partition,
        account=options.account,
        arguments=tuple(arguments),
    )


def render(job: Job) -> str:
    """The text of the batch script."""
    command = [sys.executable, "-m", "lightrft.cli.train", *job.arguments]
    wanted = (("partition", job.partition), ("account", job.account))
    return SCRIPT.format(
        name=job.name,
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        cpus_per_task=job.cpus_per_task,
        time=job.time,
        grace_seconds=job.grace_seconds,
        further="".join(f"#SBATCH --{name}={value}\n" for name, value in wanted if value),
        command=shlex.join(command),
    )


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Arguments before and after the first --, and whether there is one."""
    if "--" not in argv:
        return list(argv), False, []
    place = list(argv).index("--")
    return list(argv[:place]), True, list(argv[place + 1 :])


def _check(arguments: Sequence[str], *, world_size: int) -> None:
    parsed, unknown = build_train_parser().parse_known_args(normalise(arguments))
    flags = vars(parsed)
    processes = flags.pop("nproc_per_node")
    config, problems = merge_options([Path(name) for name in flags.pop("config")], flags)
    problems = unknown_flags(unknown) + problems
    if processes != 1:
        problems.append("nproc_per_node: leave it out, the script starts one process per GPU")
    if not problems:
        problems += batch_problems(config, world_size)
    if problems:
        raise ConfigError("\n".join(problems))


def build_parser() -> argparse.ArgumentParser:
    """The parser of `lightrft launch slurm`, without the options of the run."""
    parser = Parser(
        prog="lightrft launch slurm",
        description=DESCRIPTION,
        usage="lightrft launch slurm --print [OPTIONS] -- [OPTIONS OF lightrft train]",
        allow_abbrev=False,
    )
    parser.add_argument("--print", action="store_true", help="Print the script (the only way).")
    for flag, default, text in (
        ("--nodes", 1, "Nodes."),
        ("--gpus_per_node", 8, "GPUs of a node, one process each."),
        ("--cpus_per_task", 8, "CPU cores of a process."),
        ("--grace_seconds", 600, "Seconds before the end at which the run is asked to stop."),
    ):
        parser.add_argument(
            flag, default=default, type=at_least(1), metavar="N", help=f"{text} Default: {default}."
        )
    parser.add_argument("--time", default="24:00:00", help="Limit of the job. Default: 24:00:00.")
    parser.add_argument("--job_name", default="lightrft", help="Default: lightrft.")
    parser.add_argument("--partition", help="Where to queue.")
    parser.add_argument("--account", help="Who pays.")
    return parser
