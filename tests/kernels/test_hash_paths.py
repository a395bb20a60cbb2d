"""Both paths of the C++ hash, of which a processor takes one, give the definition's numbers."""

import ctypes
import platform
import shutil

import pytest
import torch
from tests.programs import run_program

from lightrft.kernels import hash_tensor

GCC = ("g++", "-std=c++17", "-fPIC")
DOOR = """
#include "hash.hpp"
extern "C" std::uint64_t hash_range(
    const void* data, std::int64_t numel, int itemsize, std::uint64_t start) {
    return lightrft::hash_range(data, numel, itemsize, start);
}
"""


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="no g++ for x86-64"
)
@pytest.mark.parametrize("path", ["scalar", "avx2"])
def test_the_path_equals_the_definition(repository, tmp_path, path):
    if path == "avx2" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("no AVX2 here")
    csrc = repository / "packages/kernels/csrc"
    (tmp_path / "door.cpp").write_text(DOOR)
    supports = f"-D__builtin_cpu_supports(name)={int(path == 'avx2')}"
    inner, library = tmp_path / "avx2.o", tmp_path / "hash.so"
    run_program(*GCC, "-c", "-O2", "-mavx2", csrc / "hash_avx2.cpp", "-o", inner, code=0)
    parts = (tmp_path / "door.cpp", csrc / "hash.cpp", inner)
    run_program(*GCC, "-shared", "-O2", f"-I{csrc}", supports, *parts, "-o", library, code=0)
    hash_range = ctypes.CDLL(str(library)).hash_range
    hash_range.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64]
    hash_range.restype = ctypes.c_int64
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        tensor = (torch.randn(9_001) * 50).to(dtype)
        for start in (0, 1019, 2**40 + 3):
            for part in (tensor, tensor[1:], tensor[:7], tensor[:1030], tensor[:0]):
                found = hash_range(part.data_ptr(), part.numel(), dtype.itemsize, start)
                assert found == hash_tensor(part, start=start, impl="torch")
