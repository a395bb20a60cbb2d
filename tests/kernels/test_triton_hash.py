"""The Triton hash equals the definition, in Triton's interpreter, and compiles for every GPU."""

import os

import pytest
import torch
from tests.programs import run_python

from lightrft.kernels import hash_tensor
from lightrft.kernels.weight_bucket import operations, reference

VALUES = """
import torch
from lightrft.kernels.weight_bucket import reference, triton_hash

dtypes = (torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.float64)
for dtype in dtypes:
    tensor = (torch.randn(18_003) * 50).to(dtype)
    for start, part in ((0, tensor), (2**33 + 7, tensor[1:]), (1023, tensor[:3]), (5, tensor[:0])):
        found = int(triton_hash.hash_flat(part, start))
        assert found == int(reference.hash_flat(part, start)), (dtype, start, len(part))
changed = tensor.clone()
changed[17] = -changed[17]
assert int(triton_hash.hash_flat(changed, 0)) != int(triton_hash.hash_flat(tensor, 0))
print("equal")
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightrft.kernels.weight_bucket import triton_hash

kernel = triton_hash.hash_blocks
constants = {"NUM_BITS": 16, "NUM_BLOCKS": 16, "BLOCK": 1024}
types = {
    "values": "*i16", "masks": "*i64", "factors": "*i64", "totals": "*i64",
    "first_block": "i64", "place": "i32", "numel": "i64",
}
place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
for target in (80, 90, 100, 120):
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in ("values", "place", "numel")},
    )
    gpu = GPUTarget("cuda", target, 32)
    compiled = triton.compile(source, target=gpu, options={"num_warps": 8})
    assert ".local" not in compiled.asm["ptx"], "registers are spilled"
    assert "ld.global.v" in compiled.asm["ptx"], "elements are loaded one by one"
    print(target, end=" ")
"""


def run(code, **environment):
    process = run_python(
        "-W",
        "error",
        "-c",
        code,
        timeout_seconds=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        code=0,
    )
    return process.stdout


@pytest.mark.full
@pytest.mark.triton
def test_values_in_the_interpreter_equal_the_definition():
    assert run(VALUES, TRITON_INTERPRET="1").strip() == "equal"


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_values_on_a_gpu_equal_the_definition(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    # The choice is silent only if the kernel compiled and agreed with the definition.
    hash_flat = operations.device_hasher(device)
    assert hash_flat is not reference.hash_flat
    tensor = (torch.randn(3_000_001, device=device) * 50).to(dtype)
    for start, part in ((0, tensor), (2**33 + 7, tensor[1:]), (1023, tensor[:3])):
        expected = hash_tensor(part.cpu(), start=start, impl="torch")
        assert int(hash_flat(part, start)) == expected
        assert int(reference.hash_flat(part, start)) == expected


@pytest.mark.full
@pytest.mark.triton
def test_it_compiles_for_every_gpu():
    assert run(COMPILED).split() == ["80", "90", "100", "120"]
