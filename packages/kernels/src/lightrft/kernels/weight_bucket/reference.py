"""Hash in plain torch: the definition that native code must match bitwise.

The hash of a tensor is a sum over its elements, so it does not depend on how the tensor is split:

    hash = sum_i M(c) * mix(bits_i XOR a(j) XOR A(c), k(j)) mod 2^64;  c, j = divmod(i, 1024)

    mix(x, k): x = x * k mod 2^32;  x = x XOR (x >> 15);  p = x * k (64 bits);  p XOR (p >> 32)

i is the element's index in the flattened tensor, bits_i its bit pattern, zero-extended to 32 bits;
an element of 64 bits counts as two of 32 bits, the low half first. The keys are fixed:
with q = mix64(2^64 - 1 - j) the place j has a = q mod 2^32 and the odd k = (q >> 32) OR 1; with
Q = mix64(c) the block c has A = Q >> 32 and the odd M = Q OR 1. `mix64` is SplitMix64's output
function (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 15).

Detected changes: mix is injective in x and M is odd, so every change of a single element of at
most 32 bits changes the hash. A change of several elements that is independent of the keys (bits
flipped, elements swapped, shifted, permuted, zeroed, offset) goes unnoticed with a probability of
about 2^-60, estimated for random keys. A plain sum of elements times keys would lose high bits,
such as two flipped signs, whose products do not change the low bits. The hash does not protect
against someone who chooses weights to fit it.
"""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

BLOCK_BITS = 10
BLOCK_ELEMENTS = 1 << BLOCK_BITS

# Elements mixed at a time; the int64 work space is a few times 8 bytes of this. On a CPU it should
# fit the cache, on a GPU it must be worth a dozen launches.
_CHUNK_ELEMENTS = {"cpu": 2**16}
_DEVICE_CHUNK_ELEMENTS = 2**22

_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WORD = 2**32 - 1


def to_signed(value: int) -> int:
    """Return the signed 64-bit integer congruent to `value` mod 2^64."""
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = to_signed(0x9E3779B97F4A7C15)
_MIX_1 = to_signed(0xBF58476D1CE4E5B9)
_MIX_2 = to_signed(0x94D049BB133111EB)


def combine_hashes(hashes: Iterable[int]) -> int:
    """Return the hash of a tensor from those of its disjoint flat ranges: their sum mod 2^64."""
    return to_signed(sum(hashes))


def hashed_words(tensor: Tensor, start: int) -> tuple[Tensor, int]:
    """View a contiguous tensor as flat integers of at most 32 bits, with the first index."""
    flat = tensor.view(-1).view(_BIT_VIEWS[tensor.dtype.itemsize])
    return flat, start * 2 if tensor.dtype.itemsize == 8 else start


def hash_flat(tensor: Tensor, start: int) -> Tensor:
    """Return the hash, [] int64, of a contiguous tensor whose first index is `start`."""
    flat, start = hashed_words(tensor, start)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk = _CHUNK_ELEMENTS.get(flat.device.type, _DEVICE_CHUNK_ELEMENTS)
    position = 0
    while position < flat.numel():
        place = (start + position) % BLOCK_ELEMENTS
        rest = flat.numel() - position
        # Whole blocks where possible, the part of a block before and after them.
        count = min(chunk, rest // BLOCK_ELEMENTS * BLOCK_ELEMENTS)
        if place != 0 or count == 0:
            count = min(BLOCK_ELEMENTS - place, rest)
        part = flat[position : position + count]
        total += _hash_blocks(part, (start + position) >> BLOCK_BITS, place)
        position += count
    return total


def _hash_blocks(bits: Tensor, first_block: int, place: int) -> Tensor:
    """Return the hash of whole blocks, or of a part of one block from `place` on."""
    width = min(bits.numel(), BLOCK_ELEMENTS)
    masks, factors = key_table(bits.device)
    factor = factors[place : place + width]
    blocks = torch.arange(bits.numel() // width, dtype=torch.int64, device=bits.device)
    keys = mix64_(blocks.add_(first_block))
    # int64 holds the 32-bit words, whose products wrap mod 2^64.
    x = bits.to(torch.int64).view(-1, width)
    if bits.dtype != torch.uint8:
        x.bitwise_and_((1 << 8 * bits.dtype.itemsize) - 1)
    x.bitwise_xor_(masks[place : place + width]).bitwise_xor_(shift_right(keys, 32)[:, None])
    x.mul_(factor).bitwise_and_(_WORD)
    x.bitwise_xor_(x >> 15).mul_(factor)
    x.bitwise_xor_((x >> 32).bitwise_and_(_WORD))
    return x.sum(1).mul_(keys.bitwise_or_(1)).sum()


@cache
def key_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return masks and factors of the places of a block, [1024] int64 each, below 2^32."""
    keys = mix64_(-1 - torch.arange(BLOCK_ELEMENTS, dtype=torch.int64))
    masks, factors = keys & _WORD, shift_right(keys, 32) | 1
    return masks.to(device), factors.to(device)


def mix64_(x: Tensor) -> Tensor:
    """Apply SplitMix64's output function in place to int64, whose products wrap mod 2^64."""
    x.add_(_GAMMA)
    x.bitwise_xor_(shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(shift_right(x, 31))


def shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Shift int64 as unsigned numbers: [...] int64."""
    # int64 shifts are arithmetic: clear the copies of the sign bit.
    return (x >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
