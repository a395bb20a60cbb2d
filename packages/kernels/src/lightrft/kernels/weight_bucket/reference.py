"""Hash, pack and unpack in plain torch: the definition that the native code must match bitwise."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Elements hashed at a time; the int64 work space is a few times 8 bytes of this.
CHUNK_ELEMENTS = 2**18

_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_signed(value: int) -> int:
    """The signed 64-bit integer congruent to `value` mod 2^64."""
    return (value + 2**63) % 2**64 - 2**63


_GAMMA = to_signed(0x9E3779B97F4A7C15)
_MIX_1 = to_signed(0xBF58476D1CE4E5B9)
_MIX_2 = to_signed(0x94D049BB133111EB)


def combine_hashes(hashes: Iterable[int]) -> int:
    """The hash of a tensor from the hashes of its disjoint flat ranges: their sum mod 2^64."""
    return to_signed(sum(hashes))


def hash_flat(tensor: Tensor, start: int) -> int:
    """Hash of a contiguous tensor; see `lightrft.kernels.hash_tensor` for the definition."""
    flat = tensor.view(-1).view(_BIT_VIEWS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), CHUNK_ELEMENTS):
        bits = flat[begin : begin + CHUNK_ELEMENTS].to(torch.int64)
        if flat.dtype in (torch.int16, torch.int32):
            bits &= (1 << 8 * flat.dtype.itemsize) - 1
        first = to_signed(start + begin)
        keys = torch.arange(bits.numel(), dtype=torch.int64, device=flat.device).add_(first)
        total += _mix64_(_mix64_(keys).bitwise_xor_(bits)).sum()
    return int(total.item())


def _mix64_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place on int64, whose products wrap mod 2^64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 15.
    """
    x.add_(_GAMMA)
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    # int64 shifts are arithmetic: clear the copies of the sign bit.
    return (x >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def copy_segments(sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Casts each source into its flat output; arguments are already validated."""
    for source, out in zip(sources, outs, strict=True):
        out.copy_(source if source.dim() == 1 else source.reshape(-1))
