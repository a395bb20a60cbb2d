"""Makes harness.py importable, keeps host names out of results and adds versions to them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
# Gradients of 16 bits are then rounded once; peers multiply under it, too.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--complete",
        action="store_true",
        help="on a CPU: models' own sizes and bfloat16 too; minutes with AVX-512, longer without",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "complete: on a CPU, measured with --complete only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--complete") or torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("complete")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_benchmark_update_machine_info(config, machine_info) -> None:
    for name in ("node", "release", "python_build"):
        machine_info.pop(name, None)
    machine_info.get("cpu", {}).pop("flags", None)
    machine_info["torch"] = torch.__version__
    machine_info["load_average"] = os.getloadavg()[0]  # of one minute, before the first test
    machine_info["threads"] = torch.get_num_threads()
    machine_info["gpu"] = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "none: not measured on a GPU"
    )
    for package in (
        "triton",
        "lightrft-kernels",
        "liger-kernel",
        "quack-kernels",
        "verl",
        "trl",
        "cut-cross-entropy",
        "transformers",
        "deepspeed",
    ):
        try:
            machine_info[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            machine_info[package] = "absent"
