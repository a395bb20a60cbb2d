"""Values of run and audit side by side, decisions at bounds, and inputs moved by rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HELD = 20.0  # bound of a logarithm before exp
# Number of times that a formula is computed on moved inputs: some signs, and all of them opposite.
NUM_DRAWS = 4


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

    def minus(self, other: Pair) -> Pair:
        """Return the difference."""
        return Pair(self.exact - other.exact, self.run - other.run)

    def less(self, other: Pair, mask: Tensor) -> Pair:
        """Return the difference inside the mask, 0 outside."""
        return self.minus(other).map(lambda each: torch.where(mask, each, 0.0))


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


class Draw:
    """Random signs of rounding errors; draw 0 has no errors.

    What a formula gives on inputs moved by their rounding, less what it gives on the exact ones,
    is the rounding of its result.

    Args:
        number: Number of the draw; an even one has the opposite signs of the one before.
        borders: Decisions at bounds.
    """

    def __init__(self, number: int, borders: Borders) -> None:
        self.number, self.borders = number, borders
        self._sign = 1.0 if number % 2 else -1.0
        self._random = torch.Generator().manual_seed((number + 1) // 2)

    def signed(self, sizes: Tensor) -> Tensor:
        """Return errors of these sizes."""
        if not self.number:
            return torch.zeros_like(sizes)
        signs = torch.randint(0, 2, sizes.shape, generator=self._random) * 2 - 1
        return self._sign * signs * sizes

    def move(self, value: Pair, error: Tensor) -> Pair:
        """Return the value with an error, which the run's value shares."""
        shift = self.signed(error)
        return value.map(lambda each: each + shift)


def draws(borders: Borders) -> list[Draw]:
    """Return the draw without errors, which counts decisions at bounds, and those with errors."""
    moved = [Draw(n, Borders(borders.tolerance)) for n in range(1, NUM_DRAWS + 1)]
    return [Draw(0, borders), *moved]


def rounding_of(results: list[Tensor]) -> Tensor:
    """Return the largest distance of the results of the draws from the first one, the exact."""
    return torch.stack([(each - results[0]).abs() for each in results]).amax(dim=0)


def with_slope_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the derivative of another."""
    return other + (value - other).detach()


def row_lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens of each row, at least 1: [rows, 1]."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1).double()
