"""The Triton kernels without a GPU: their values in the interpreter, their code by compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightrft.kernels import linear_logprob

FOLDER = Path(__file__).parent


def run(arguments: list[str], **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-6000:]
    return process.stdout


@pytest.mark.triton
def test_values_in_the_interpreter():
    case_file = FOLDER / "interpreter_cases.py"
    output = run(
        ["-m", "pytest", str(case_file), "-q", "-p", "no:cacheprovider"], TRITON_INTERPRET="1"
    )
    assert "passed" in output


@pytest.mark.triton
def test_kernels_compile_without_spills():
    results = [json.loads(line) for line in run([str(FOLDER / "compile_kernels.py")]).splitlines()]
    assert len(results) >= 16
    for result in results:
        assert result["stack_bytes"] == 0, result
        assert result["num_spills"] == 0, result
        assert result["shared_bytes"] <= result["max_shared_bytes"], result
        assert result["num_products"] > 0, result
        assert (result["num_bulk_copies"] > 0) == result["uses_tma"], result
        assert (result["num_register_moves"] > 0) == result["is_specialized"], result
    assert {result["target"] for result in results} == {80, 90, 100}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_without_a_gpu_triton_is_refused():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the kernels run in the interpreter")
    tensors = torch.randn(3, 8), torch.randn(5, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="impl='triton' is not available here"):
        linear_logprob(*tensors, impl="triton")
    with pytest.raises(ValueError, match="'batch_invariant' is not available here"):
        linear_logprob(*tensors, deterministic="batch_invariant")
