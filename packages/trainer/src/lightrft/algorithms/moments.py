"""Mean and standard deviation of many numbers, over tokens, ranks and steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lightrft.algorithms.masking import mask_out

Values = TypeVar("Values", float, Tensor)
MIN_VARIANCE = 1e-8  # of whitened advantages; a constant batch must not be amplified


def spread(lowest: Values, highest: Values) -> Values:
    """Distance of two float64 numbers beyond the rounding of weighted sums; equal ones have none.

    0.1 + 0.2 and 0.3 are equal: a group of such rewards teaches nothing.
    """
    return highest - lowest - 1e-13 * (abs(lowest) + abs(highest) + 1e-3)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and squared deviations of the numbers seen so far.

    Raw sums of squares would cancel: of 1e8 +- 1 their difference has no correct digit.

    Args:
        count: How many.
        mean: Their mean; 0 of none.
        sum_of_squares: Sum of squared deviations from the mean.
    """

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both together.

        Source: Chan, Golub and LeVeque 1979, Updating formulae for computing sample variances.
        """
        count = self.count + other.count
        if other.count == 0:
            return self
        delta = other.mean - self.mean
        between = delta**2 * self.count * other.count / count
        return Moments(
            count=count,
            mean=self.mean + delta * other.count / count,
            sum_of_squares=self.sum_of_squares + other.sum_of_squares + between,
        )

    def std(self, *, ddof: int, min_variance: float = 0.0) -> float:
        """Standard deviation sqrt(sum_of_squares / (count - ddof)).

        1 where that is undefined, or 0 up to the rounding of the mean.

        Args:
            ddof: 0 for the numbers themselves, 1 for the population they were drawn from.
            min_variance: Lower bound of the variance.
        """
        rounding = self.count * (1e-14 * self.mean) ** 2
        if self.count <= ddof or self.sum_of_squares <= rounding:
            return 1.0
        return math.sqrt(max(self.sum_of_squares / (self.count - ddof), min_variance))


def moments_of(values: Tensor) -> Moments:
    """Moments of all entries, in float64."""
    return masked_moments(values, torch.ones_like(values, dtype=torch.bool))


def masked_moments(
    values: Tensor, mask: Tensor, *, sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Moments:
    """Moments of the values inside the mask, in float64 and two passes: the mean comes first.

    Args:
        values, mask: Local values and mask, of equal shape.
        sum_over_ranks: Sums a small float64 tensor over ranks; called twice, on every rank. None
            gives the moments of the local values.
    """
    inside = mask_out(values.detach().double(), mask)
    sums = torch.stack([mask.sum().double(), inside.sum()])
    summed = sum_over_ranks or Tensor.clone
    total, mean = summed(sums).tolist()
    mean /= max(total, 1.0)
    squares = summed(mask_out((inside - mean).square(), mask).sum())
    return Moments(int(total), mean, float(squares))


@dataclass(frozen=True, slots=True)
class PairedMoments:
    """Moments of pairs of numbers.

    Args:
        count: How many pairs.
        means: Means of the first and of the second numbers.
        squares: Sums of squared deviations of each.
        products: Sum of the products of their deviations.
    """

    count: float
    means: tuple[float, float]
    squares: tuple[float, float]
    products: float

    @classmethod
    def of(cls, numbers: Tensor) -> PairedMoments:
        """Return the moments as numbers, from [6] of `paired_moments` or `join_moments`."""
        count, first, second, squares, other_squares, products = numbers.tolist()
        return cls(count, (first, second), (squares, other_squares), products)

    @property
    def correlation(self) -> float | None:
        """Correlation; None if one side is constant. NaN is passed on to be seen."""
        if self.is_constant(0) or self.is_constant(1):
            return None
        return self.products / math.sqrt(self.squares[0] * self.squares[1])

    def is_constant(self, index: int) -> bool:
        """Return whether the first or second numbers are equal, up to rounding; False for NaN."""
        rounding = self.count * (1e-14 * self.means[index]) ** 2
        return self.count < 1 or self.squares[index] <= rounding


@torch.no_grad()
def paired_moments(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Moments of the pairs inside the mask, in two passes: [6] float64, see `PairedMoments`."""
    count = mask.sum().double()
    inside = [mask_out(values.double(), mask) for values in (first, second)]
    means = [values.sum() / count.clamp(min=1) for values in inside]
    x, y = (mask_out(v - mean, mask) for v, mean in zip(inside, means, strict=True))
    return torch.stack([count, *means, x.square().sum(), y.square().sum(), (x * y).sum()])


def join_moments(parts: Tensor) -> Tensor:
    """Moments [6] of all pairs, from [parts, 6] of `paired_moments`."""
    counts = parts[:, :1]
    total = counts.sum().clamp(min=1)
    means = (counts * parts[:, 1:3]).sum(dim=0) / total
    shift = parts[:, 1:3] - means
    between = torch.cat([shift.square(), shift.prod(dim=1, keepdim=True)], dim=1)
    sums = (parts[:, 3:] + counts * between).sum(dim=0)
    return torch.cat([counts.sum(dim=0), means, sums])


def whiten(values: Tensor, mask: Tensor, moments: Moments, *, ddof: int = 0) -> Tensor:
    """(values - mean) / std inside the mask, 0 outside.

    The standard deviation divides by the count (ddof 0), as OpenRLHF does; verl and SkyRL divide
    by count - 1, which makes the result sqrt((n - 1) / n) times as large for n tokens.

    Args:
        values: [batch, seq].
        mask: [batch, seq] bool.
        moments: Moments of the whole step over all ranks, not of these rows: the result must not
            depend on the split into micro-batches or ranks.
        ddof: What the divisor leaves out of the count.
    """
    std = moments.std(ddof=ddof, min_variance=MIN_VARIANCE)
    return mask_out((values.double() - moments.mean) / std, mask).to(values.dtype)


@torch.no_grad()
def effective_sample_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of the weights; all-reduce by summation."""
    inside = mask_out(weights.double(), mask)
    return torch.stack([mask.sum().double(), inside.sum(), inside.square().sum()])


def effective_sample_fraction(sums: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of `effective_sample_sums`: 1 for equal weights, 0 of none."""
    count, total, squares = sums.tolist()
    return float(total**2 / (count * squares)) if count * squares > 0 else 0.0
