"""What the hash of weights finds: planted faults of every kind, and each has its own hash."""

import pytest
import torch

from lightrft.kernels import hash_tensor
from lightrft.kernels.weight_bucket import reference

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMEL = 5000


def integers(tensor):
    return tensor.view(BITS[tensor.element_size()])


def sign_bit(dtype):
    bits = 8 * dtype.itemsize
    return -(2 ** (bits - 1)) if bits > 8 else 128


def weights(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    values = {
        "normal": torch.randn(NUMEL, generator=generator),
        "ones": torch.ones(NUMEL),
        "zeros": torch.zeros(NUMEL),
        "ramp": torch.arange(NUMEL) / 64,
    }
    return values[kind].to(dtype)


def flip(tensor, places, mask):
    out = tensor.clone()
    integers(out)[places] ^= mask
    return out


def take(tensor, order):
    """A tensor in another order; float8 has no indexing of its own."""
    return integers(tensor)[order].view(tensor.dtype)


def faults(tensor):
    """(name, faulty copy): everything that a wrong copy, cast or layout could plausibly do."""
    order = torch.arange(NUMEL)
    sign = sign_bit(tensor.dtype)
    for places in ([0], [NUMEL - 1], [3, 4], [3, 1027], [3, 4, 1027, 1028], list(range(64))):
        yield f"sign flips at {places[:4]}", flip(tensor, places, sign)
        yield f"lowest bits flipped at {places[:4]}", flip(tensor, places, 1)
    yield "all signs flipped", flip(tensor, order, sign)
    for distance in (1, 2, 1024, 2048):
        swapped = order.clone()
        swapped[[7, 7 + distance]] = swapped[[7 + distance, 7]]
        yield f"two elements {distance} apart swapped", take(tensor, swapped)
        yield f"shifted by {distance}", take(tensor, order.roll(distance))
    halves = order.clone()
    halves[:2048] = torch.cat((order[1024:2048], order[:1024]))
    yield "two blocks swapped", take(tensor, halves)
    yield "reversed", take(tensor, order.flip(0))
    yield "transposed", take(tensor, order.view(50, 100).T.reshape(-1))
    for begin, end in ((0, 1), (100, 200), (1000, 1048), (1024, 2048), (0, NUMEL)):
        zeroed = tensor.clone()
        integers(zeroed)[begin:end] = 0
        yield f"[{begin}, {end}) zeroed", zeroed
        offset = tensor.clone()
        integers(offset)[begin:end] += 1
        yield f"[{begin}, {end}) one unit in the last place higher", offset
    balanced = tensor.clone()
    integers(balanced)[10:20] += 1
    integers(balanced)[30:40] -= 1
    yield "ten elements a bit higher, ten a bit lower", balanced


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ones", "zeros", "ramp"])
def test_planted_faults_change_the_hash(kind, dtype):
    tensor = weights(kind, dtype)
    expected = hash_tensor(tensor, start=5)
    planted = [
        (name, copy)
        for name, copy in faults(tensor)
        if not torch.equal(integers(copy), integers(tensor))  # zeros remain zeros
    ]
    assert len(planted) >= 15
    seen = {expected: "nothing"}
    for name, copy in planted:
        value = hash_tensor(copy, start=5)
        assert value != expected, name
        twin = seen.setdefault(value, name)
        assert twin == name or dict(planted)[twin].equal(copy), (name, twin)


def test_no_two_places_of_a_block_share_a_key():
    masks, factors = reference.key_table(torch.device("cpu"))
    assert len(masks.unique()) == len(factors.unique()) == 1024
    assert (factors % 2 == 1).all()
