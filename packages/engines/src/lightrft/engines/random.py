"""Counter-based random numbers: each depends on its own coordinates and on nothing else."""

from collections.abc import Sequence

import torch

from lightrft.kernels.weight_bucket.reference import mix64_, shift_right, to_signed

_MANTISSA_BITS = 52


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Splitmix64's output function, element by element, modulo 2^64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 16.

    Args:
        values: int64 of any shape, read as unsigned.

    Returns:
        int64 of the same shape.
    """
    return mix64_(values.clone())


def row_keys(
    seed: int, request_ids: Sequence[int], sample_indices: Sequence[int], *, device: torch.device
) -> torch.Tensor:
    """One 64-bit key for each (seed, request, sample).

    Returns:
        [rows] int64.
    """
    seeds = torch.tensor([to_signed(seed)], dtype=torch.int64, device=device)
    requests = torch.tensor([to_signed(i) for i in request_ids], dtype=torch.int64, device=device)
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
    return shift_right(bits, 64 - _MANTISSA_BITS).to(torch.float64) * 2.0**-_MANTISSA_BITS
