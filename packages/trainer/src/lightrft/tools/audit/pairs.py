"""Numbers of run and audit side by side, decisions at bounds, and derivatives by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HELD = 20.0  # of a logarithm that is exponentiated


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity twice, in float64: as recomputed, and as the run had it."""

    own: Tensor
    run: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Pair:
        """Both, changed alike."""
        return Pair(change(self.own), change(self.run))

    def at(self, places: Tensor | list[int] | tuple[int, Tensor]) -> Pair:
        """Some entries of both, by any index of a tensor."""
        return Pair(self.own[places], self.run[places])

    def less(self, other: Pair, mask: Tensor) -> Pair:
        """The difference inside the mask, 0 outside."""
        return Pair(
            torch.where(mask, self.own - other.own, 0.0),
            torch.where(mask, self.run - other.run, 0.0),
        )


@dataclass(slots=True)
class Borders:
    """Decisions at a bound: the run's is taken where both values are equal up to rounding.

    A value within rounding of a bound may fall on either side of it, and neither is wrong.

    Args:
        tolerance: Relative to 1, or to the value if larger, up to which two values are equal.
        num_taken: How often the run's side was taken although the own one differed.
    """

    tolerance: float
    num_taken: int = 0

    def above(self, value: Pair, bound: float) -> Tensor:
        """Whether the value exceeds the bound."""
        return self._decide(value, value.own > bound, value.run > bound)

    def at_least(self, value: Pair, bound: float) -> Tensor:
        """Whether the value reaches the bound."""
        return self._decide(value, value.own >= bound, value.run >= bound)

    def sign(self, value: Pair) -> Tensor:
        """-1, 0 or 1."""
        return self.above(value, 0.0).double() - (~self.at_least(value, 0.0)).double()

    def _decide(self, value: Pair, own: Tensor, run: Tensor) -> Tensor:
        limit = self.tolerance * value.own.abs().clamp(min=1.0)
        is_close = (value.own - value.run).abs() <= limit
        self.num_taken += int(((own != run) & is_close).sum())
        return torch.where(is_close, run, own)

    def highest(self, values: Pair, count: int) -> Tensor:
        """Places of so many highest values, of equal ones the first; [] of 0."""
        by_exact, by_run = (
            torch.argsort(each, descending=True, stable=True)[:count]
            for each in (values.own, values.run)
        )
        limit = values.own[by_exact[-1:]] - self.tolerance
        return by_run if bool((values.own[by_run] >= limit).all()) else by_exact


# Values of scores, which are added up: differentiable by the own ones.
Formula = Callable[[Pair, Borders], Tensor]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Values of a formula, and the derivative of their sum by each score."""

    value: Tensor
    slope: Tensor

    def distance(self, other: Differentiated) -> Differentiated:
        """Differences without their signs."""
        return Differentiated((self.value - other.value).abs(), (self.slope - other.slope).abs())

    def plus(self, other: Differentiated) -> Differentiated:
        """The sums."""
        return Differentiated(self.value + other.value, self.slope + other.slope)


def differentiated(formula: Formula, scores: Pair, borders: Borders) -> Differentiated:
    """Values and derivatives of a formula."""
    leaf = scores.own.detach().requires_grad_()
    value = formula(Pair(leaf, scores.run), borders)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return Differentiated(value.detach(), slope)


def with_rounding(
    formula: Formula, scores: Pair, shifts: Sequence[Tensor], borders: Borders
) -> tuple[Differentiated, Differentiated]:
    """A formula, and how far its values and slopes move at most if the scores move by a shift."""
    exact = differentiated(formula, scores, borders)
    moved = exact.distance(exact)
    for shift in shifts:
        shifted = Pair(scores.own + shift, scores.run + shift)
        distance = exact.distance(differentiated(formula, shifted, Borders(borders.tolerance)))
        moved = Differentiated(
            torch.maximum(moved.value, distance.value), torch.maximum(moved.slope, distance.slope)
        )
    return exact, moved


def with_slope_of(value: Tensor, other: Tensor) -> Tensor:
    """The value, with the derivative of something else."""
    return other + (value - other).detach()


def row_lengths(mask: Tensor) -> Tensor:
    """[rows, 1] tokens of each row, at least 1."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1).double()
