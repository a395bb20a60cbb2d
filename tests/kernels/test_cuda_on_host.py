"""The device code of the weight buckets, compiled for the host and run thread by thread.

Only what the host lacks is replaced: the conversion instructions, the vector types and the
streaming accesses, which here also check that every vector is aligned. It says nothing about speed,
nor about the launch.
"""

import ctypes
import platform
import re
import shutil

import pytest
import torch
from tests.programs import run_program

from lightrft.kernels import hash_tensor
from lightrft.kernels.weight_bucket import cuda
from lightrft.kernels.weight_bucket.native import Move

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="no g++ for x86-64"
)

TILE_ELEMENTS = 1 << 13
SHIM = """
#include <immintrin.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Thread { int x; };
static Thread threadIdx;
static long num_misaligned = 0;
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned b) { float v; std::memcpy(&v, &b, 4); return v; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((low | static_cast<std::uint64_t>(high) << 32) >> (shift & 31));
}
static unsigned __float_as_uint(float v) { unsigned b; std::memcpy(&b, &v, 4); return b; }
template <typename T> void check(const T* p) {
    num_misaligned += reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0;
}
template <typename T> T __ldcs(const T* p) { check(p); return *p; }
template <typename T> T __ldg(const T* p) { check(p); return *p; }
template <typename T> void __stcs(T* p, T v) { check(p); std::memcpy(p, &v, sizeof v); }
static unsigned narrow(float v) {
    const unsigned b = __float_as_uint(v);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
"""
REPLACEMENTS = {
    '    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));': (
        "    bits = narrow(low) | narrow(high) << 16;"
    ),
    '    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));': (
        "    bits = _cvtss_sh(low, 0) | static_cast<unsigned>(_cvtss_sh(high, 0)) << 16;"
    ),
    '    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));': "    value = _cvtsh_ss(bits);",
    "#include <cuda_runtime.h>": "",
}
DRIVER = """
}  // namespace
extern "C" long run_on_host(
    const DeviceSegment* segments, std::int64_t num_segments, std::int64_t num_tiles,
    std::int64_t num_blocks, std::uint64_t* hashes) {
    num_misaligned = 0;
    const auto add = [&](std::int64_t slot, std::uint64_t total) { hashes[slot] += total; };
    for (std::int64_t block = 0; block < num_blocks; ++block) {
        for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) {
            run_tiles<true>(
                segments, num_segments, num_tiles * block / num_blocks,
                num_tiles * (block + 1) / num_blocks, add);
        }
    }
    return num_misaligned;
}
}  // namespace lightrft
"""


@pytest.fixture(scope="module")
def run_on_host(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    csrc = repository / "packages/kernels/csrc"
    source = (csrc / "bucket.cu").read_text()
    for device, host in REPLACEMENTS.items():
        assert source.count(device) == 1, device
        source = source.replace(device, host)
    source = source[: re.search(r"template <bool WithHash>\n__global__", source).start()]
    (folder / "bucket.cpp").write_text(SHIM + source + DRIVER)
    library = folder / "bucket.so"
    how = ("g++", "-std=c++17", "-fPIC", "-shared", "-O1", "-mf16c", "-w", f"-I{csrc}")
    run_program(*how, folder / "bucket.cpp", "-o", library, code=0)
    function = ctypes.CDLL(str(library)).run_on_host
    function.argtypes = [ctypes.c_void_p, *3 * [ctypes.c_int64], ctypes.c_void_p]
    function.restype = ctypes.c_long

    def run(moves, *, num_blocks):
        """Hashes of the moves, which are carried out; no access may be misaligned."""
        words, num_tiles = cuda.build_table(moves, TILE_ELEMENTS)
        hashes = torch.zeros(len(moves), dtype=torch.int64)
        num_segments = len(words) // 12
        address, _ = words.buffer_info()
        assert function(address, num_segments, num_tiles, num_blocks, hashes.data_ptr()) == 0
        return hashes.tolist()

    return run


def move_of(source, out, start=0, dtype=None):
    """One entry of `run`'s list; without `out` the source is only hashed."""
    rows, row_elements, stride = 1, source.numel(), 0
    if not source.is_contiguous():
        (rows, row_elements), stride = source.shape, source.stride(0)
    address = 0 if out is None else out.data_ptr()
    dtype = dtype or (source if out is None else out).dtype
    return Move(source.data_ptr(), address, rows, row_elements, stride, source.dtype, dtype, start)


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


@pytest.mark.parametrize("source_dtype, out_dtype", CASTS)
@pytest.mark.parametrize("source_shift", [0, 1, 5])
@pytest.mark.parametrize("out_shift", [0, 1, 8])
def test_bits_and_hashes_equal_torch(run_on_host, source_dtype, out_dtype, source_shift, out_shift):
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), 65504.0, 65520.0, 1e-8, 1e-40, 3.0])
    sources = []
    for numel in (3 * TILE_ELEMENTS + 4321, 3, 1, 17, 8192):
        values = torch.randn(numel, generator=generator) * 40
        if source_dtype != torch.uint8 and numel > 8:
            values[:8] = special
        source = aligned(numel, source_dtype, source_shift)
        source.copy_(values.abs() if source_dtype == torch.uint8 else values)
        sources.append(source)
    # A column shard of a matrix: rows that are apart, each aligned as it happens to be.
    sources.append(sources[0][:24000].view(60, 400)[:, 7:150])
    outs = [aligned(source.numel(), out_dtype, out_shift) for source in sources]
    starts = [0, 10, 2**40, 5, 1, 77]
    moves = [move_of(*each) for each in zip(sources, outs, starts, strict=True)]
    hashes = run_on_host(moves, num_blocks=3)
    for source, out, start, value in zip(sources, outs, starts, hashes, strict=True):
        expected = source.to(out_dtype).reshape(-1)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        assert value == hash_tensor(expected, start=start)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_copies_of_any_alignment_write_nothing_else(run_on_host, dtype):
    itemsize = dtype.itemsize
    numel = 5000
    source_bytes = torch.randint(0, 256, (numel * itemsize + 64,), dtype=torch.uint8)
    for source_skip in range(0, 16, itemsize):
        for out_skip in range(0, 16, itemsize):
            memory = torch.full((numel * itemsize + 64,), 7, dtype=torch.uint8)
            begin = -memory.data_ptr() % 16 + out_skip
            first = -source_bytes.data_ptr() % 16 + source_skip
            source = source_bytes[first : first + numel * itemsize].view(dtype)
            out = memory[begin : begin + numel * itemsize].view(dtype)
            (value,) = run_on_host([move_of(source, out, start=1021)], num_blocks=1)
            assert torch.equal(out.view(torch.uint8), source.view(torch.uint8))
            assert value == hash_tensor(source, start=1021)
            assert (memory[:begin] == 7).all()
            assert (memory[begin + numel * itemsize :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_hash_without_a_destination(run_on_host, dtype):
    tensor = torch.randn(TILE_ELEMENTS * 2 + 5).to(dtype)[3:]
    (value,) = run_on_host([move_of(tensor, None, start=9)], num_blocks=2)
    assert value == hash_tensor(tensor, start=9)
    wide = tensor.float()
    (value,) = run_on_host([move_of(wide, None, 9, torch.bfloat16)], num_blocks=2)
    assert value == hash_tensor(wide.bfloat16(), start=9)


@pytest.mark.parametrize("num_blocks", [1, 4, 9, 400])
def test_every_tile_is_done_once_however_many_blocks_there_are(run_on_host, num_blocks):
    sizes = [1, 9 * TILE_ELEMENTS, 5, TILE_ELEMENTS, 3 * TILE_ELEMENTS + 1, 2]
    sources = [torch.randn(size) for size in sizes]
    outs = [torch.zeros_like(source) for source in sources]
    moves = [move_of(source, out) for source, out in zip(sources, outs, strict=True)]
    hashes = run_on_host(moves, num_blocks=num_blocks)
    # A tile that is done twice would add to its hash twice.
    assert hashes == [hash_tensor(source) for source in sources]
    assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))
