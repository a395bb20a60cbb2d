"""The printed manifest has the fields, and only the fields, that the operator's schema knows.

Fields as published in the Go types that the custom resource definitions are made from:
https://github.com/kubeflow/training-operator/blob/v1.9.0/pkg/apis/kubeflow.org/v1/pytorch_types.go
https://github.com/kubeflow/training-operator/blob/v1.9.0/pkg/apis/kubeflow.org/v1/common_types.go
https://github.com/kubernetes/api/blob/v0.31.0/core/v1/types.go (pods)
"""

import json

from lightrft.cli.main import main

# A dict names the fields that may occur; {"*": ...} any name; [x] a list of x; a set the values.
RESOURCES = {"*": (str, int)}
CONTAINER = {
    "name": {"pytorch"},
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str}],
    "resources": {"limits": RESOURCES, "requests": RESOURCES},
    "volumeMounts": [{"name": str, "mountPath": str}],
    "ports": [dict],
    "imagePullPolicy": str,
}
VOLUME = {
    "name": str,
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": str},
    "persistentVolumeClaim": {"claimName": str},
}
POD = {
    "containers": [CONTAINER],
    "volumes": [VOLUME],
    "terminationGracePeriodSeconds": int,
    "nodeSelector": dict,
    "tolerations": [dict],
}
REPLICA = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {"metadata": dict, "spec": POD},
}
SCHEMA = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "metadata": {"name": str, "namespace": str, "labels": dict},
    "spec": {
        "nprocPerNode": str,
        "runPolicy": {
            "cleanPodPolicy": {"", "All", "Running", "None"},
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
        },
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}
REQUIRED = ("apiVersion", "kind", "metadata", "spec")


def problems(value, schema, path=""):
    """Where a value differs from the table."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path}: not an object"]
        unknown = [
            f"{path}.{name}: unknown" for name in value if name not in schema and "*" not in schema
        ]
        known = [(name, schema.get(name, schema.get("*"))) for name in value]
        inner = [p for name, s in known if s for p in problems(value[name], s, f"{path}.{name}")]
        return unknown + inner
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path}: not a list"]
        return [
            p for i, item in enumerate(value) for p in problems(item, schema[0], f"{path}[{i}]")
        ]
    if isinstance(schema, set):
        return [] if value in schema else [f"{path}: {value!r} is none of {schema}"]
    is_right = isinstance(value, schema) and not isinstance(value, bool)
    return [] if is_right else [f"{path}: {value!r} is no {schema}"]


def run(capsys, *argv):
    code = main(["launch", "kubernetes", *argv])
    return code, capsys.readouterr()


def manifest_of(capsys, *argv):
    code, shown = run(capsys, "--print", "--image", "registry/lightrft:1", *argv)
    assert (code, shown.err) == (0, "")
    return json.loads(shown.out)


def test_the_manifest_is_one_of_the_published_schema(capsys):
    prompt = 'it\'s $(HOME); {} "now"'
    asked = "--nodes 3 --gpus_per_node 4 --claim shared --namespace ours -- --pretrain /data/m"
    asked += " --rollout_batch_size 24 --train_batch_size 96 --input_template"
    job = manifest_of(capsys, *asked.split(), prompt)
    assert not problems(job, SCHEMA)
    assert set(REQUIRED) <= set(job)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in replicas.items()} == {"Master": 1, "Worker": 2}
    assert job["spec"]["nprocPerNode"] == "4"
    for spec in replicas.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["command"][:4] == [
            "torchrun",
            "--nnodes=3",
            "--nproc-per-node=4",
            "--max-restarts=0",
        ]
        assert container["args"][-1] == prompt.replace("$(", "$$(")
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert len(mounted) == 2


def test_one_node_has_no_workers(capsys):
    job = manifest_of(capsys, "--", "--pretrain", "m")
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Master"]
