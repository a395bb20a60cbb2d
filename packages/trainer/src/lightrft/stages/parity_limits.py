"""Limits of the differences that rounding causes between passes with equal weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch


class ParityError(RuntimeError):
    """Engine and trainer compute different logprobs for the same tokens."""


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """Largest differences that rounding explains.

    Args:
        mean: Limit of the mean |difference| of a token's logprobs.
        largest: Limit of the largest |difference| of a token's logprobs.
        hidden: Limit of ||a - b|| / ||b|| of the outputs of a layer.
    """

    mean: float
    largest: float
    hidden: float


# Two float32 forwards of one model differ by about 1e-6 in the mean. In bfloat16 a real vLLM is
# 0.011 away from transformers in the mean and 0.06 at most on small models. Single unlikely tokens
# of large models differ more, so the mean decides. Keyed by the coarsest dtype in use.
PARITY_LIMITS: dict[torch.dtype, ParityLimits] = {
    torch.float64: ParityLimits(mean=1e-4, largest=1e-2, hidden=1e-4),
    torch.float32: ParityLimits(mean=1e-4, largest=1e-2, hidden=1e-4),
    torch.float16: ParityLimits(mean=0.02, largest=1.0, hidden=0.01),
    torch.bfloat16: ParityLimits(mean=0.05, largest=5.0, hidden=0.05),
}


QUANTISED_LIMITS = ParityLimits(mean=0.2, largest=10.0, hidden=0.2)


def parity_limits(dtypes: Collection[torch.dtype]) -> ParityLimits:
    """Return the limits of the coarsest dtype in which engine or trainer compute."""
    candidates = [PARITY_LIMITS.get(dtype, QUANTISED_LIMITS) for dtype in dtypes]
    return max(candidates, key=lambda limits: limits.mean)
