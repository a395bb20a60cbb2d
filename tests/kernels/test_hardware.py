"""Capabilities are plain facts about this process."""

import importlib.util
import os

import pytest
import torch
from tests.programs import run_program

from lightrft.kernels import capabilities
from lightrft.kernels.weight_bucket.native import load_extension


def test_capabilities_agree_with_what_can_be_imported():
    found = capabilities()
    assert found.native_extension == (load_extension() is not None)
    assert found.triton == (importlib.util.find_spec("triton") is not None)
    assert found.cuda == torch.cuda.is_available()
    assert found.native_extension or not found.cuda_extension


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmarks_without_a_gpu_say_so_and_write_nothing(repository, tmp_path):
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    process = run_program(
        str(repository / "benchmarks/gpu/run_all.sh"),
        "--out",
        str(results),
        timeout_seconds=60,
        env={**os.environ, "TMPDIR": str(scratch)},
        code=1,
    )
    assert "no GPU" in process.stderr
    assert not results.exists()
    assert not scratch.exists()
