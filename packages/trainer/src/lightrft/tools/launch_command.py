"""`lightrft launch`: prints what starts a run on several nodes.

For Kubernetes that is a PyTorchJob of kubeflow.org/v1. Kubeflow's training operator starts one pod
per node. PET_* variables show torchrun where the others are.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.options import parse_options
from lightrft.cli.train import build_parser as build_train_parser
from lightrft.config.policy_options import launch_problems
from lightrft.strategy.config import ConfigError
from lightrft.tools.commands import parser_of


def build_parsers() -> list[argparse.ArgumentParser]:
    """Return the parsers of all actions."""
    return [parser_of(f"launch {name}") for name in ACTIONS]


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft launch slurm --help` and `lightrft launch kubernetes --help`.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(f"usage: lightrft launch {{{','.join(ACTIONS)}}} ...\n")
        print("\n".join(f"{action}: {example}" for action, (_, example) in ACTIONS.items()))
        return ExitCode.OK
    if name not in ACTIONS:
        examples = "; ".join(example for _, example in ACTIONS.values())
        got = f"got {name!r}" if name else "nothing was given"
        raise UsageError(f"lightrft launch: {got}, expected {' or '.join(ACTIONS)}: {examples}")
    print(ACTIONS[name][0](argv[1:]))
    return ExitCode.OK


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, example: str, submit: str
) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the launcher's options, parsed, and those of the run, which stand after "--".

    Args:
        parser: Parser of the launcher.
        argv: All arguments.
        example: Correct command.
        submit: Command that sends what was printed to the scheduler.

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


def check_form(
    options: dict[str, Any], names: Sequence[str], form: re.Pattern[str], expected: str
) -> None:
    """Raise a UsageError for a text of another form."""
    for name in names:
        value = options[name]
        if value is not None and not form.fullmatch(value):
            raise UsageError(f"--{name}: got {value!r}, expected {expected}")


def check_run(options: dict[str, Any], arguments: Sequence[str]) -> None:
    """Raise a ConfigError for options of `lightrft train` that these machines cannot run."""
    config, parsed, problems = parse_options(build_train_parser(), arguments)
    if parsed.nproc_per_node != 1:
        problems.append("nproc_per_node: leave it out, one process per GPU is started")
    if not problems:
        world_size = options["nodes"] * options["gpus_per_node"]
        problems += launch_problems(config.overlapped(world_size), world_size)
    refuse(problems, ConfigError)


SLURM_EXAMPLE = "lightrft launch slurm --print --nodes 2 --gpus_per_node 8 -- --config run.toml"
TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}")
WORD = re.compile(r"[\w.,@-]+")


def script(argv: Sequence[str]) -> str:
    """Return the text of the batch script, from arguments and options that have been checked.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    import jinja2

    options, arguments = read_options(
        parser_of("launch slurm"), argv, example=SLURM_EXAMPLE, submit="sbatch"
    )
    check_form(options, ("time",), TIME, "for example 8:00:00 or 2-00:00:00")
    check_form(
        options, ("job_name", "partition", "account"), WORD, "letters, digits, . , _ @ and -"
    )
    check_run(options, arguments)
    template = Path(__file__).with_name("slurm.sh.jinja").read_text("utf-8")
    command = shlex.join([sys.executable, "-m", "lightrft.cli.train", *arguments])
    return str(jinja2.Template(template, trim_blocks=True).render(command=command, **options))


KUBERNETES_EXAMPLE = (
    "lightrft launch kubernetes --print --image IMAGE --nodes 2 --gpus_per_node 8 -- --config "
    "/data/run.toml"
)
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?([KMGT]i?)?")
SHARED_MEMORY = "shared-memory"
STORAGE = "storage"


def manifest(argv: Sequence[str]) -> str:
    """Return the text of the manifest, from arguments and options that have been checked.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    options, arguments = read_options(
        parser_of("launch kubernetes"), argv, example=KUBERNETES_EXAMPLE, submit="kubectl apply"
    )
    check_form(
        options,
        ("job_name", "namespace", "claim"),
        NAME,
        "at most 52 lower-case letters, digits and -, with a letter or digit at both ends",
    )
    check_form(options, ("memory", "shared_memory"), QUANTITY, "for example 64Gi")
    check_run(options, arguments)
    return json.dumps(job(options, arguments), indent=2)


def job(options: dict[str, Any], arguments: Sequence[str]) -> dict[str, object]:
    """Return the PyTorchJob."""
    replicas = {"Master": 1, "Worker": options["nodes"] - 1}
    metadata = {"name": options["job_name"]}
    if options["namespace"] is not None:
        metadata["namespace"] = options["namespace"]
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(options["gpus_per_node"]),
            # A run that fails would fail again; pods that wait for a lost one end with the job.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "pytorchReplicaSpecs": {
                role: {
                    "replicas": count,
                    "restartPolicy": "Never",
                    "template": {"spec": pod(options, arguments)},
                }
                for role, count in replicas.items()
                if count > 0
            },
        },
    }


def pod(options: dict[str, Any], arguments: Sequence[str]) -> dict[str, object]:
    """Return one node's pod; the operator expects a container called pytorch."""
    gpus, cores = options["gpus_per_node"], options["cpus_per_task"]
    resources = {"nvidia.com/gpu": gpus, "cpu": gpus * cores, "memory": options["memory"]}
    volumes: list[dict[str, object]] = [
        # NCCL and the data loaders need more than the 64 MB that a container has by default.
        {
            "name": SHARED_MEMORY,
            "emptyDir": {"medium": "Memory", "sizeLimit": options["shared_memory"]},
        }
    ]
    mounts = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
    if options["claim"] is not None:
        volumes.append({"name": STORAGE, "persistentVolumeClaim": {"claimName": options["claim"]}})
        mounts.append({"name": STORAGE, "mountPath": options["mount"]})
    container = {
        "name": "pytorch",
        "image": options["image"],
        "command": [
            "torchrun",
            f"--nnodes={options['nodes']}",
            f"--nproc-per-node={gpus}",
            "--max-restarts=0",
            "-m",
            "lightrft.cli.train",
        ],
        # Not through a shell; a $(NAME) in them would be replaced by Kubernetes.
        "args": [argument.replace("$(", "$$(") for argument in arguments],
        "env": [{"name": "OMP_NUM_THREADS", "value": str(cores)}],
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": mounts,
    }
    grace = options["grace_seconds"]
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": grace}


ACTIONS: dict[str, tuple[Callable[[Sequence[str]], str], str]] = {
    "slurm": (script, SLURM_EXAMPLE),
    "kubernetes": (manifest, KUBERNETES_EXAMPLE),
}
