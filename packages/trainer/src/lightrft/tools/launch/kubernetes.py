"""`lightrft launch kubernetes`: the manifest of a run under Kubeflow's training operator.

A PyTorchJob of kubeflow.org/v1: the operator starts one pod per node and tells torchrun, by PET_*
variables, where the others are.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence

from lightrft.cli.errors import UsageError
from lightrft.tools.launch.launcher import check_run, launcher_parser, read_options

DESCRIPTION = """\
Print the manifest (JSON, which kubectl takes) of a Kubeflow PyTorchJob for one run: a pod per node
and a process per GPU. Everything after -- are options of lightrft train, which are checked first.
Nothing is restarted by itself: the same manifest with --load_checkpoint continues a run.
"""
EXAMPLE = (
    "lightrft launch kubernetes --print --image IMAGE --nodes 2 --gpus_per_node 8 -- --config "
    "/data/run.toml"
)
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?\Z")
QUANTITY = re.compile(r"\d+(\.\d+)?([KMGT]i?)?\Z")
SHARED_MEMORY = "shared-memory"
STORAGE = "storage"


def manifest(argv: Sequence[str]) -> str:
    """The text of the manifest, of arguments and options that have been checked.

    Raises:
        UsageError: Arguments that cannot be read.
        ConfigError: Options of `lightrft train` that cannot be run on these nodes.
    """
    options, arguments = read_options(build_parser(), argv, example=EXAMPLE, submit="kubectl apply")
    check_names(options)
    check_run(options, arguments)
    return json.dumps(job(options, arguments), indent=2)


def check_names(options: dict[str, object]) -> None:
    """Raises a UsageError for what Kubernetes would refuse."""
    for name in ("job_name", "namespace", "claim"):
        value = options[name]
        if value is not None and not NAME.match(str(value)):
            raise UsageError(
                f"--{name}: got {value!r}, expected at most 52 lower-case letters, digits and -, "
                "with a letter or digit at both ends"
            )
    for name in ("memory", "shared_memory"):
        if not QUANTITY.match(str(options[name])):
            raise UsageError(f"--{name}: got {options[name]!r}, expected for example 64Gi")


def job(options: dict[str, object], arguments: Sequence[str]) -> dict[str, object]:
    """The PyTorchJob."""
    nodes = int(str(options["nodes"]))
    replicas = {"Master": 1, "Worker": nodes - 1}
    metadata = {"name": options["job_name"]}
    if options["namespace"] is not None:
        metadata["namespace"] = options["namespace"]
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(options["gpus_per_node"]),
            # A run that fails fails again; pods that wait for a lost one are ended with the job.
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


def pod(options: dict[str, object], arguments: Sequence[str]) -> dict[str, object]:
    """One node's pod; the operator expects a container called pytorch."""
    gpus, cores = int(str(options["gpus_per_node"])), int(str(options["cpus_per_task"]))
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
        mounts.append({"name": STORAGE, "mountPath": str(options["mount"])})
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
    grace = int(str(options["grace_seconds"]))
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": grace}


def build_parser() -> argparse.ArgumentParser:
    """The parser of `lightrft launch kubernetes`, without the options of the run."""
    parser = launcher_parser(
        "kubernetes",
        DESCRIPTION,
        required="--image IMAGE ",
        grace_seconds=60,
        grace="Seconds between asking a pod to end and ending it.",
    )
    parser.add_argument("--image", required=True, help="Container image with lightrft in it.")
    for flag, text, preset in (
        ("--namespace", "Default: kubectl's.", None),
        ("--memory", "Memory of a pod. Default: 256Gi.", "256Gi"),
        ("--shared_memory", "Of that, /dev/shm at most. Default: 16Gi.", "16Gi"),
        ("--claim", "Persistent volume claim with model, data and output.", None),
        ("--mount", "Where it is mounted. Default: /data.", "/data"),
    ):
        parser.add_argument(flag, help=text, default=preset)
    return parser
