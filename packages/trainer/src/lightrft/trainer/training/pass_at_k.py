"""pass@k: the chance that at least one of k samples is right, estimated from n >= k samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pass_at_k(num_correct: NDArray[np.int64], *, num_samples: int, k: int) -> NDArray[np.float64]:
    """Unbiased estimate of pass@k of every prompt.

    1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1 .. n} (1 - k / i), for c right samples of n

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1 and fig. 3.

    Args:
        num_correct: [prompts] int64, each in [0, num_samples].
        num_samples: n, samples of each prompt.
        k: In [1, num_samples].

    Returns:
        [prompts] float64.

    Raises:
        ValueError: k or a count is out of range.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be in [1, {num_samples}], the number of samples: got {k}")
    if len(num_correct) and not 0 <= num_correct.min() <= num_correct.max() <= num_samples:
        raise ValueError(f"num_correct must be in [0, {num_samples}]: got {num_correct.tolist()}")
    places = np.arange(1, num_samples + 1)
    # A factor below 0 belongs to i < k, where fewer than k samples are wrong: the product is 0.
    factors = np.maximum(0.0, 1.0 - k / places)
    is_counted = places[None, :] > num_samples - num_correct[:, None]
    missing: NDArray[np.float64] = np.where(is_counted, factors[None, :], 1.0).prod(axis=1)
    return 1.0 - missing


def default_k(num_samples: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to and including the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return tuple(sorted({*(power for power in powers if power <= num_samples), num_samples}))
