"""Importing any part of lightrft needs neither a GPU nor an optional package."""

import pytest
from tests.programs import run_python

PACKAGES = (
    "config",
    "kernels",
    "engines",
    "strategy",
    "utils",
    "algorithms",
    "models",
    "datasets",
    "rewards",
    "records",
    "rollout",
    "experience",
    "reporting",
    "stages",
    "run",
    "trainer",
    "cli",
    "tools",
)
OPTIONAL = (
    "vllm",
    "sglang",
    "deepspeed",
    "triton",
    "wandb",
    "matplotlib",
    "peft",
    "tensorboard",
    "trackio",
    "mlflow",
    "swanlab",
)

BLOCKED_IMPORT = """
import importlib, pkgutil, sys
for name in {optional!r}:
    sys.modules[name] = None  # importing it raises ImportError
for package in {packages!r}:
    module = importlib.import_module("lightrft." + package)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
    for info in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        is_adapter = ".deepspeed." in info.name or ".vllm." in info.name or "triton_" in info.name
        if not is_adapter and not info.name.endswith("__main__"):
            importlib.import_module(info.name)
import torch
assert not torch.cuda.is_initialized()
print("imported")
"""


@pytest.mark.full
def test_every_module_imports_without_optional_packages():
    code = BLOCKED_IMPORT.format(optional=OPTIONAL, packages=PACKAGES)
    done = run_python("-c", code, timeout_seconds=240, code=0)
    assert done.stdout.strip().endswith("imported")


def test_configuration_modules_import_the_standard_library_only():
    code = (
        "import sys, lightrft.config;"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'deepspeed'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    run_python("-c", code, timeout_seconds=120, code=0)


@pytest.mark.full
def test_a_model_costs_what_torch_and_transformers_cost():
    code = (
        "import sys\n"
        "import lightrft.datasets, lightrft.rewards, lightrft.experience, lightrft.trainer\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'packages are lazy'\n"
        "import torch\n"
        "from transformers import AutoModelForCausalLM, PreTrainedModel\n"
        "before = set(sys.modules)\n"
        "from lightrft.models import Actor\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))\n"
    )
    done = run_python("-c", code, timeout_seconds=240, code=0)
    added = set(done.stdout.split())
    assert "lightrft" in added
    # torchvision is what transformers takes for images.
    assert added <= {"lightrft", "torch", "torchvision", "transformers"}
