"""The device code of the weight buckets, compiled for the host and run thread by thread.

Only what the host lacks is replaced: the conversion instructions, the vector types and the
streaming accesses, which here also check that every vector is aligned. It says nothing about speed,
nor about the launch.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess

import pytest
import torch

from lightrft.kernels import hash_tensor
from lightrft.kernels.weight_bucket import cuda

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="no g++ for x86-64"
)

TILE_ELEMENTS = 1 << 15
SHIM = """
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Thread { int x; };
static Thread threadIdx;
static long num_misaligned = 0;
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned __float_as_uint(float v) { unsigned b; std::memcpy(&b, &v, 4); return b; }
template <typename T> void check(const T* p) {
    num_misaligned += reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0;
}
template <typename T> T __ldcs(const T* p) { check(p); return *p; }
template <typename T> void __stcs(T* p, T v) { check(p); std::memcpy(p, &v, sizeof v); }
static unsigned narrow(float v) {
    const unsigned b = __float_as_uint(v);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
"""
REPLACEMENTS = {
    '    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));':
        "    bits = narrow(low) | narrow(high) << 16;",
    '    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));':
        "    bits = _cvtss_sh(low, 0) | static_cast<unsigned>(_cvtss_sh(high, 0)) << 16;",
    '    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));': "    value = _cvtsh_ss(bits);",
    "#include <cuda_runtime.h>": "",
}  # fmt: skip
DRIVER = """
}  // namespace
extern "C" long run_on_host(
    const DeviceSegment* segments, const std::int32_t* tiles, std::int64_t num_tiles,
    std::uint64_t* hashes) {
    num_misaligned = 0;
    for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
        const DeviceSegment& segment = segments[tiles[tile]];
        const std::int64_t first = (tile - segment.first_tile) * kDeviceTileElements;
        const std::int64_t rest = segment.rows * segment.row_elements - first;
        const std::int64_t count = rest < kDeviceTileElements ? rest : kDeviceTileElements;
        for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) {
            hashes[segment.hash_slot] += run_tile<true>(segment, first, count);
        }
    }
    return num_misaligned;
}
}  // namespace lightrft
"""


@pytest.fixture(scope="module")
def run_on_host(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    csrc = repository / "packages" / "kernels" / "csrc"
    source = (csrc / "bucket.cu").read_text()
    for device, host in REPLACEMENTS.items():
        assert source.count(device) == 1, device
        source = source.replace(device, host)
    source = source[: re.search(r"template <bool WithHash>\n__global__", source).start()]
    (folder / "bucket.cpp").write_text(SHIM + source + DRIVER)
    library = folder / "bucket.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-mf16c", "-shared", "-fPIC", f"-I{csrc}",
         "-Wno-unknown-pragmas", "-o", str(library), str(folder / "bucket.cpp")],
        check=True, timeout=120,
    )  # fmt: skip
    function = ctypes.CDLL(str(library)).run_on_host
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_long
    return function


def aligned(numel, dtype, shift):
    """A tensor whose first element lies `shift` elements after a 16-byte boundary."""
    memory = torch.zeros(numel * dtype.itemsize + 64 + shift * dtype.itemsize, dtype=torch.uint8)
    skip = -memory.data_ptr() % 16 + shift * dtype.itemsize
    return memory[skip : skip + numel * dtype.itemsize].view(dtype)


CASTS = [
    (torch.uint8, torch.uint8),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize(("source_dtype", "out_dtype"), CASTS)
@pytest.mark.parametrize("source_shift", [0, 1, 5])
@pytest.mark.parametrize("out_shift", [0, 1, 8])
def test_bits_and_hashes_equal_torch(run_on_host, source_dtype, out_dtype, source_shift, out_shift):
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), 65504.0, 65520.0, 1e-8, 1e-40, 3.0])
    sources = []
    for numel in (TILE_ELEMENTS + 4321, 3, 1, 17, 8192):
        values = torch.randn(numel, generator=generator) * 40
        if source_dtype != torch.uint8 and numel > 8:
            values[:8] = special
        source = aligned(numel, source_dtype, source_shift)
        source.copy_(values.abs() if source_dtype == torch.uint8 else values)
        sources.append(source)
    # A column shard of a matrix: rows that are apart, each aligned as it happens to be.
    sources.append(sources[0][:36000].view(90, 400)[:, 7:150])
    outs = [aligned(source.numel(), out_dtype, out_shift) for source in sources]
    starts = [0, 10, 2**40, 5, 1, 77]
    table = cuda.build_table(cuda.segment_rows(sources, outs, starts), TILE_ELEMENTS)
    hashes = torch.zeros(len(sources), dtype=torch.int64)
    num_misaligned = run_on_host(
        table.segments.data_ptr(), table.tile_segments.data_ptr(), table.tile_segments.numel(),
        hashes.data_ptr(),
    )  # fmt: skip
    assert num_misaligned == 0
    for source, out, start, value in zip(sources, outs, starts, hashes.tolist(), strict=True):
        expected = source.to(out_dtype).reshape(-1)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        assert value == hash_tensor(expected, start=start)


def test_hash_without_a_destination(run_on_host):
    tensor = torch.randn(TILE_ELEMENTS * 2 + 5).bfloat16()[3:]
    row = (tensor.data_ptr(), 0, 1, tensor.numel(), 0, 0, 0, 9, 1, 0, 0, 0)
    table = cuda.build_table([row], TILE_ELEMENTS)
    hashes = torch.zeros(1, dtype=torch.int64)
    run_on_host(
        table.segments.data_ptr(), table.tile_segments.data_ptr(), table.tile_segments.numel(),
        hashes.data_ptr(),
    )  # fmt: skip
    assert hashes.item() == hash_tensor(tensor, start=9)
