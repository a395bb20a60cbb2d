"""Numbers that describe a step; sums are additive over ranks, divisions come last."""

import torch
from torch import Tensor

from lightrft.algorithms.masking import mask_out


@torch.no_grad()
def explained_variance_sums(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """[5] float64: count, sum and sum of squares of returns, the same of the critic's errors.

    All-reduce by summation.

    Args:
        values, returns: [batch, seq].
        response_mask: [batch, seq] bool.
    """
    target = mask_out(returns.double(), response_mask)
    error = mask_out(returns.double() - values.double(), response_mask)
    count = response_mask.sum().double()
    sums = [count, target.sum(), target.square().sum(), error.sum(), error.square().sum()]
    return torch.stack(sums)


def explained_variance(sums: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) of `explained_variance_sums`.

    Blind to a constant offset of the values. None where the returns are constant, so that there
    is nothing to explain.
    """
    count, returns, squares, errors, error_squares = sums.tolist()
    if count < 1:
        return None
    variance = squares / count - (returns / count) ** 2
    # Below the rounding of the sums a variance is not told from 0.
    if variance <= 1e-12 * max(squares / count, 1e-30):
        return None
    return float(1.0 - (error_squares / count - (errors / count) ** 2) / variance)


@torch.no_grad()
def effective_sample_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of the weights; all-reduce by summation."""
    inside = mask_out(weights.double(), mask)
    return torch.stack([mask.sum().double(), inside.sum(), inside.square().sum()])


def effective_sample_fraction(sums: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of `effective_sample_sums`: 1 for equal weights, 0 of none."""
    count, total, squares = sums.tolist()
    return float(total**2 / (count * squares)) if count * squares > 0 else 0.0
