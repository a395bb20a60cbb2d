"""Counter-based random numbers: each depends on its own coordinates and on nothing else."""

from collections.abc import Sequence

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MANTISSA_BITS = 52


def _signed(value: int) -> int:
    """The signed 64-bit integer with the same bits as `value` mod 2^64."""
    return ((value + 2**63) % 2**64) - 2**63


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Splitmix64's output function, element by element, modulo 2^64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 16.

    Args:
        values: int64 of any shape, read as unsigned.

    Returns:
        int64 of the same shape.
    """
    values = values + _signed(_GOLDEN)
    values = (values ^ _shift_right(values, 30)) * _signed(_MULTIPLIER_1)
    values = (values ^ _shift_right(values, 27)) * _signed(_MULTIPLIER_2)
    return values ^ _shift_right(values, 31)


def _shift_right(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    # int64 shifts copy the sign bit down; the mask removes the copies.
    return (values >> num_bits) & ((1 << (64 - num_bits)) - 1)


def row_keys(
    seed: int, request_ids: Sequence[int], sample_indices: Sequence[int], *, device: torch.device
) -> torch.Tensor:
    """One 64-bit key for each (seed, request, sample).

    Returns:
        [rows] int64.
    """
    seeds = torch.tensor([_signed(seed)], dtype=torch.int64, device=device)
    requests = torch.tensor([_signed(i) for i in request_ids], dtype=torch.int64, device=device)
    samples = torch.tensor(list(sample_indices), dtype=torch.int64, device=device)
    return mix64(mix64(mix64(seeds) ^ requests) ^ samples)


def uniforms(keys: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) for the output positions start .. stop-1 of each row.

    They are multiples of 2^-52, so that u * total < total holds after rounding to float64.

    Args:
        keys: [rows] int64 from `row_keys`.
        start, stop: Range of output positions.

    Returns:
        [stop - start, rows] float64.
    """
    positions = torch.arange(start, stop, dtype=torch.int64, device=keys.device)
    bits = mix64(keys[None, :] ^ mix64(positions)[:, None])
    return _shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) * 2.0**-_MANTISSA_BITS
