"""The Triton kernels without a GPU: their values in the interpreter."""

import os
from pathlib import Path

import pytest
import torch
from tests.programs import run_python

from lightrft.kernels import linear_logprob

FOLDER = Path(__file__).parent


@pytest.mark.triton
@pytest.mark.parametrize(
    "chosen",
    ["129 and 257 or b2_one_chunk", pytest.param("", marks=pytest.mark.full)],
    ids=["a cover", "all"],
)
def test_values_in_the_interpreter(chosen):
    case_file = FOLDER / "interpreter_cases.py"
    words = ("-m", "pytest", case_file, "-q", "-p", "no:cacheprovider", "-k", chosen)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = run_python(*words, code=0, timeout_seconds=280, env=environment)
    assert "passed" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_without_a_gpu_triton_is_refused():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the kernels run in the interpreter")
    tensors = torch.randn(3, 8), torch.randn(5, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="impl='triton' is not available here"):
        linear_logprob(*tensors, impl="triton")
