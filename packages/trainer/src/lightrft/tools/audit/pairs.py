"""Values of run and audit side by side, decisions at bounds, and inputs moved by rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

HELD = 20.0  # bound of a logarithm before exp
# Tolerance above which a run computes in bfloat16; its weights differ enough to choose otherwise.
ROUNDED = 0.1
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
        repeats: True to repeat the choices of highest values: another choice is no rounding.
        choices: Choices of highest values, in the order of the computation.
    """

    tolerance: float
    num_taken: int = 0
    repeats: bool = False
    choices: list[Tensor] = field(default_factory=list)

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
        if self.repeats:
            self.choices.append(self.choices.pop(0))
            return self.choices[-1]
        by_exact, by_run = (
            torch.argsort(each, descending=True, stable=True)[:count]
            for each in (values.exact, values.run)
        )
        limit = values.exact[by_exact[-1:]] - self.tolerance
        is_equal = (values.exact[by_run] >= limit).all()
        self.choices.append(by_run if is_equal else by_exact)
        return self.choices[-1]


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
        self._sign = number and (1.0 if number % 2 else -1.0)
        self._random = torch.Generator().manual_seed((number + 1) // 2)

    def signed(self, sizes: Tensor) -> Tensor:
        """Return errors of these sizes."""
        return self._sign * signed(sizes, self._random)

    def move(self, value: Pair, error: Tensor) -> Pair:
        """Return the value with an error, which the run's value shares."""
        shift = self.signed(error)
        return value.map(lambda each: each + shift)


def signed(sizes: Tensor, random: torch.Generator) -> Tensor:
    """Return errors of these sizes with random signs."""
    return sizes * (torch.randint(0, 2, sizes.shape, generator=random) * 2 - 1)


def draws(borders: Borders) -> list[Draw]:
    """Return the draw without errors, which counts decisions at bounds, and those with errors."""
    borders.choices.clear()
    others = replace(borders, repeats=borders.tolerance < ROUNDED)
    return [Draw(n, others if n else borders) for n in range(NUM_DRAWS + 1)]


def rounding_of(results: Sequence[Tensor]) -> Tensor:
    """Return the largest distance of the results of the draws from the first one, the exact."""
    return torch.stack([(each - results[0]).abs() for each in results]).amax(dim=0)


def with_slope_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the derivative of another."""
    return other + (value - other).detach()


def row_lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens of each row, at least 1: [rows, 1]."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1).double()
