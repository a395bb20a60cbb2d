"""Values of run and audit side by side, decisions at bounds, and derivatives by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HELD = 20.0  # bound of a logarithm before exp


@dataclass(frozen=True, slots=True)
class Pair:
    """Recomputed value and the run's value of one quantity, in float64."""

    exact: Tensor
    run: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Pair:
        """Apply one function to both values."""
        return Pair(change(self.exact), change(self.run))

    def at(self, places: Tensor | list[int] | tuple[int, Tensor]) -> Pair:
        """Index both values."""
        return Pair(self.exact[places], self.run[places])

    def less(self, other: Pair, mask: Tensor) -> Pair:
        """Return the difference inside the mask, 0 outside."""
        return Pair(
            torch.where(mask, self.exact - other.exact, 0.0),
            torch.where(mask, self.run - other.run, 0.0),
        )


@dataclass(slots=True)
class Borders:
    """Decisions at a bound: the run decides where both values are equal up to rounding.

    A value within rounding of a bound may fall on either side of it, and neither is wrong.

    Args:
        tolerance: Largest difference of equal values, relative to 1 or to the value if larger.
        num_taken: Number of decisions taken from the run against the recomputed value.
    """

    tolerance: float
    num_taken: int = 0

    def above(self, value: Pair, bound: float) -> Tensor:
        """Return whether the value exceeds the bound."""
        return self._decide(value, value.exact > bound, value.run > bound)

    def at_least(self, value: Pair, bound: float) -> Tensor:
        """Return whether the value reaches the bound."""
        return self._decide(value, value.exact >= bound, value.run >= bound)

    def sign(self, value: Pair) -> Tensor:
        """Return the sign: -1, 0 or 1."""
        return self.above(value, 0.0).double() - (~self.at_least(value, 0.0)).double()

    def _decide(self, value: Pair, exact: Tensor, run: Tensor) -> Tensor:
        limit = self.tolerance * value.exact.abs().clamp(min=1.0)
        is_close = (value.exact - value.run).abs() <= limit
        self.num_taken += int(((exact != run) & is_close).sum())
        return torch.where(is_close, run, exact)

    def highest(self, values: Pair, count: int) -> Tensor:
        """Return the places of the `count` highest values; the first ones among equal values."""
        by_exact, by_run = (
            torch.argsort(each, descending=True, stable=True)[:count]
            for each in (values.exact, values.run)
        )
        limit = values.exact[by_exact[-1:]] - self.tolerance
        return by_run if bool((values.exact[by_run] >= limit).all()) else by_exact


# Values whose sum is differentiated by the recomputed scores.
Formula = Callable[[Pair, Borders], Tensor]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Values of a formula, and the derivative of their sum by each score."""

    value: Tensor
    slope: Tensor

    def distance(self, other: Differentiated) -> Differentiated:
        """Return absolute differences."""
        return Differentiated((self.value - other.value).abs(), (self.slope - other.slope).abs())

    def plus(self, other: Differentiated) -> Differentiated:
        """Return the sums."""
        return Differentiated(self.value + other.value, self.slope + other.slope)


def differentiated(formula: Formula, scores: Pair, borders: Borders) -> Differentiated:
    """Return values and derivatives of a formula."""
    leaf = scores.exact.detach().requires_grad_()
    value = formula(Pair(leaf, scores.run), borders)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return Differentiated(value.detach(), slope)


def with_rounding(
    formula: Formula, scores: Pair, shifts: Sequence[Tensor], borders: Borders
) -> tuple[Differentiated, Differentiated]:
    """Return a formula's result, and its largest change if the scores move by a shift."""
    exact = differentiated(formula, scores, borders)
    moved = exact.distance(exact)
    for shift in shifts:
        shifted = Pair(scores.exact + shift, scores.run + shift)
        distance = exact.distance(differentiated(formula, shifted, Borders(borders.tolerance)))
        moved = Differentiated(
            torch.maximum(moved.value, distance.value), torch.maximum(moved.slope, distance.slope)
        )
    return exact, moved


def with_slope_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the derivative of another."""
    return other + (value - other).detach()


def row_lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens of each row, at least 1: [rows, 1]."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1).double()
