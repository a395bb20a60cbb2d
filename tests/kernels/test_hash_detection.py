"""What the hash of weights finds: planted faults of every kind, and how often two would cancel.

A hash of 64 bits cannot be tested for a rate of 2^-62 by planting faults. So the differences that a
fault makes are looked at through windows of 24 bits: where they behave like random numbers, N of
them meet zero, or one another's negative, as often as random numbers of 24 bits do.
"""

from __future__ import annotations

import math

import pytest
import torch

from lightrft.kernels import hash_tensor
from lightrft.kernels.weight_bucket import reference

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMEL = 5000
WINDOW_BITS = 24


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


def mix64(x):
    return reference.mix64_(x.clone())


def shares(values, index):
    """What each value of at most 32 bits adds to the hash at its index: [values] int64."""
    masks, factors = reference.key_table(torch.device("cpu"))
    key = mix64(index >> 10)
    place = index % 1024
    bits = integers(values).to(torch.int64) & (2 ** (8 * values.element_size()) - 1)
    x = bits ^ masks[place] ^ ((key >> 32) & (2**32 - 1))
    x = (x * factors[place]) & (2**32 - 1)
    x = (x ^ (x >> 15)) * factors[place]
    return (x ^ ((x >> 32) & (2**32 - 1))) * (key | 1)


def linear_shares(values, index):
    """What a hash that only multiplies would add: an odd key of 64 bits times the element."""
    return integers(values).to(torch.int64) * (mix64(index) | 1)


def test_the_shares_of_the_definition_add_up_to_the_hash():
    tensor = weights("normal", torch.bfloat16)
    index = torch.arange(1000, 1000 + NUMEL)
    assert int(shares(tensor, index).sum()) == hash_tensor(tensor, start=1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("index", [0, 1023, 1024, 2**40 + 17])
def test_every_value_of_one_element_has_a_share_of_its_own(dtype, index):
    bits = torch.arange(2 ** (8 * min(dtype.itemsize, 2)))
    values = bits.to(BITS[dtype.itemsize]).view(dtype)
    assert len(shares(values, torch.full((len(values),), index)).unique()) == len(values)


def differences(kind, mask, dtype, shares_of):
    """What flipping `mask` in one element adds to the hash, for every element: [NUMEL] int64."""
    tensor = weights(kind, dtype)
    index = torch.arange(NUMEL)
    return shares_of(flip(tensor, index, mask), index) - shares_of(tensor, index)


def num_cancelling_pairs(values, low_bit):
    """Pairs whose sum or difference is 0 in WINDOW_BITS bits from `low_bit` on."""
    window = (values >> low_bit) & (2**WINDOW_BITS - 1)
    opposite = -window & (2**WINDOW_BITS - 1)
    _, counts = torch.minimum(window, opposite).unique(return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


# Pairs of NUMEL random numbers that agree up to sign in so many bits, and five deviations more.
EXPECTED_PAIRS = NUMEL * (NUMEL - 1) / 2 * 2 / 2**WINDOW_BITS
MOST_PAIRS = EXPECTED_PAIRS + 5 * math.sqrt(EXPECTED_PAIRS) + 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["normal", "ones", "zeros", "ramp"])
@pytest.mark.parametrize("bit", ["sign", "lowest"])
def test_two_flipped_bits_cancel_no_more_often_than_random_numbers(kind, dtype, bit):
    mask = sign_bit(dtype) if bit == "sign" else 1
    values = differences(kind, mask, dtype, shares)
    for low_bit in (0, 20, 40):
        assert num_cancelling_pairs(values, low_bit) <= MOST_PAIRS, low_bit


def test_the_windows_find_that_a_linear_hash_loses_sign_flips():
    values = differences("normal", sign_bit(torch.float32), torch.float32, linear_shares)
    assert num_cancelling_pairs(values, 0) == NUMEL * (NUMEL - 1) // 2
    assert num_cancelling_pairs(values, 20) > 10 * MOST_PAIRS


def test_a_linear_hash_of_64_bit_elements_loses_any_two_sign_flips():
    tensor = weights("normal", torch.float64)
    changed = flip(tensor, [3, 2000], sign_bit(torch.float64))
    index = torch.arange(NUMEL)
    assert linear_shares(changed, index).sum() == linear_shares(tensor, index).sum()
    assert hash_tensor(changed) != hash_tensor(tensor)


def test_no_two_places_of_a_block_share_a_key():
    masks, factors = reference.key_table(torch.device("cpu"))
    assert len(masks.unique()) == len(factors.unique()) == 1024
    assert (factors % 2 == 1).all()
