"""Hash, pack and unpack: the definition in Python integers; native code equals torch bitwise."""

import itertools
import sys

import pytest
import torch

from lightrft.kernels import combine_hashes, hash_tensor, hash_tensors, pack, unpack
from lightrft.kernels.weight_bucket.native import load_extension

MASK = 2**64 - 1
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8]
DTYPES += [torch.uint8, torch.float8_e4m3fn]
BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=["torch", "native"])
def impl(request):
    if request.param == "native" and load_extension() is None:
        pytest.skip("the C++ extension is not built")
    return request.param


def mix64(x):
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix(x, factor):
    x = x * factor % 2**32
    product = (x ^ (x >> 15)) * factor
    return product ^ (product >> 32)


def slow_hash(tensor, start=0):
    """The definition, one unit of at most 32 bits after the other."""
    size = tensor.element_size()
    words = tensor.reshape(-1).view(BIT_DTYPES[min(size, 4)]).tolist()
    total = 0
    for index, word in enumerate(words, start * (2 if size == 8 else 1)):
        block, place = divmod(index, 1024)
        block_key, place_key = mix64(block), mix64(MASK - place)
        x = (word & (2 ** (8 * min(size, 4)) - 1)) ^ (place_key % 2**32) ^ (block_key >> 32)
        total += (block_key | 1) * mix(x, place_key >> 32 | 1)
    return (total + 2**63) % 2**64 - 2**63


def bits(tensor):
    return tensor.view(BIT_DTYPES[tensor.element_size()])


def awkward_floats():
    """Random bit patterns, all exponents, NaNs with payloads, infinities, ties, subnormals."""
    generator = torch.Generator().manual_seed(0)
    random_bits = torch.randint(-(2**31), 2**31, (2**18,), generator=generator)
    half_range = torch.arange(0x33000000, 0x48000000, 9973)
    nans = torch.arange(0x7F800000 - 5000, 0x80000000, 99991)
    edges = torch.tensor([0, 0x7F800000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001])
    patterns = torch.cat([random_bits, half_range, nans, edges])
    return torch.cat([patterns, patterns - 2**31]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_equals_its_definition_in_python_integers(dtype, impl):
    torch.manual_seed(1)
    tensor = (torch.randn(41, 61) * 50).to(dtype)  # more than two blocks
    assert hash_tensor(tensor, impl=impl) == slow_hash(tensor)
    assert hash_tensor(tensor, start=2**40 + 3, impl=impl) == slow_hash(tensor, 2**40 + 3)
    assert hash_tensor(tensor[:1, :5], start=1021, impl=impl) == slow_hash(tensor[:1, :5], 1021)


def test_hash_is_additive_over_ranges_and_across_chunks(impl):
    torch.manual_seed(2)
    tensor = torch.randn(2**18 * 2 + 77).bfloat16()
    cuts = [0, 5, 2**16 - 1, 2**18 + 1, 2**19, tensor.numel()]
    parts = [hash_tensor(tensor[a:b], start=a, impl=impl) for a, b in itertools.pairwise(cuts)]
    assert combine_hashes(parts) == hash_tensor(tensor, impl=impl)
    assert combine_hashes(parts) == combine_hashes(reversed(parts))


def test_many_tensors_at_once_hash_like_each_alone_after_their_casts(impl):
    torch.manual_seed(4)
    tensors = [torch.randn(n) for n in (5, 0, 70_001, 1024)]
    tensors += [torch.randn(6, 9).T, torch.randn(33).half(), torch.randn(12, dtype=torch.float64)]
    starts = [0, 7, 2**33 + 1, 1023, 4, 0, 5]
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float32, torch.float32]
    if impl == "native":  # has no cast from float64
        tensors, starts, dtypes = tensors[:-1], starts[:-1], dtypes[:-1]
    expected = [
        hash_tensor(t.to(d), start=s, impl="torch")
        for t, s, d in zip(tensors, starts, dtypes, strict=True)
    ]
    found = hash_tensors(tensors, starts=starts, dtypes=dtypes, impl=impl)
    assert found == expected
    assert hash_tensors(tensors, impl=impl) == [hash_tensor(t, impl="torch") for t in tensors]
    assert hash_tensors([], impl=impl) == []


def test_hash_of_strided_empty_and_scalar_tensors(impl):
    matrix = torch.randn(5, 8)
    assert hash_tensor(matrix.T, impl=impl) == slow_hash(matrix.T.contiguous())
    assert hash_tensor(torch.empty(0), impl=impl) == 0
    assert hash_tensor(torch.tensor(2.5), impl=impl) == slow_hash(torch.tensor([2.5]))
    assert combine_hashes([]) == 0
    assert combine_hashes([2**63 - 1, 1]) == -(2**63)


def test_hash_refuses_what_it_cannot_hash():
    with pytest.raises(ValueError, match="complex64"):
        hash_tensor(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="2 tensors, 1 starts, 2 dtypes"):
        hash_tensors([torch.zeros(2)] * 2, starts=[0])
    with pytest.raises(ValueError, match="got -1"):
        hash_tensor(torch.zeros(2), start=-1)
    with pytest.raises(
        ValueError, match="unknown impl 'fast': expected one of auto, native, torch"
    ):
        hash_tensor(torch.zeros(2), impl="fast")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_packed_casts_are_bitwise_those_of_torch(dtype, num_threads, impl):
    source = awkward_floats()
    out = torch.zeros(source.numel() * 2 + 64, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        pack([source], out, [32], [dtype], impl=impl)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(out[32:-32].view(dtype)), bits(source.to(dtype)))
    assert not out[:32].any()
    assert not out[-32:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_widens_as_in_torch(dtype, impl):
    source = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    out = torch.zeros(source.numel() * 4, dtype=torch.uint8)
    pack([source], out, [0], [torch.float32], impl=impl)
    assert torch.equal(bits(out.view(torch.float32)), bits(source.float()))


def test_pack_then_unpack_returns_every_tensor(impl):
    torch.manual_seed(3)
    sources = [torch.randn(n).to(d) for n, d in ((5, DTYPES[0]), (0, DTYPES[2]), (4099, DTYPES[3]))]
    offsets = [16, 64, 128]
    dtypes = [tensor.dtype for tensor in sources]
    out = torch.zeros(40000, dtype=torch.uint8)
    pack(sources, out, offsets, dtypes, impl=impl)
    outs = [torch.empty_like(tensor) for tensor in sources]
    unpack(out, offsets, outs, impl=impl)
    for source, result in zip(sources, outs, strict=True):
        assert torch.equal(source, result)


def test_casts_without_native_code_fall_back_to_torch():
    source = torch.randn(33, dtype=torch.float64)
    out = torch.zeros(132, dtype=torch.uint8)
    pack([source], out, [0], [torch.float32])
    assert torch.equal(out.view(torch.float32), source.float())
    if load_extension() is not None:
        with pytest.raises(RuntimeError, match="this device or cast"):
            pack([source], out, [0], [torch.float32], impl="native")


def test_without_a_compiler_the_numbers_are_the_same(monkeypatch):
    sources = [torch.randn(3001), torch.randn(17)]
    dtypes = [torch.bfloat16] * 2

    def everything():
        out = torch.zeros(8000, dtype=torch.uint8)
        pack(sources, out, [0, 7000], dtypes)
        return out.tolist(), hash_tensors(sources, starts=[5, 6], dtypes=dtypes)

    expected = everything()
    monkeypatch.setitem(sys.modules, "lightrft.kernels._native", None)
    load_extension.cache_clear()
    try:
        assert load_extension() is None
        assert everything() == expected
    finally:
        load_extension.cache_clear()


def test_pack_refuses_bad_arguments():
    out = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"segment \[60, 68\) lies outside the bucket of 64 bytes"):
        pack([torch.zeros(2)], out, [60], [torch.float32])
    with pytest.raises(ValueError, match="multiple of 4 bytes: got 2"):
        pack([torch.zeros(2)], out, [2], [torch.float32])
    with pytest.raises(ValueError, match="must be contiguous"):
        pack([torch.zeros(2, 4).T], out, [0], [torch.float32])
    with pytest.raises(ValueError, match="1 sources, 2 offsets, 1 dtypes"):
        pack([torch.zeros(2)], out, [0, 8], [torch.float32])
    with pytest.raises(ValueError, match="1-D uint8"):
        unpack(torch.zeros(64), [0], [torch.zeros(1)])
    with pytest.raises(ValueError, match="got 2 and 1"):
        unpack(out, [0, 4], [torch.zeros(1)])
