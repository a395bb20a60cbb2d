"""Values of run and audit side by side, decisions at bounds, and inputs moved by rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

HELD = 20.0  # bound of a logarithm before exp
# Tolerance above which a run computes in bfloat16; its weights differ enough to choose otherwise.
ROUNDED = 0.1
# Number of times that a step is computed on moved inputs: some signs, and all of them opposite.
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
class Draw:
    """One computation of the step: signs of its rounding errors, and decisions at bounds.

    Draw 0 has no errors. What others give, less what it gives, is the rounding of a result.

    A value within rounding of a bound may fall on either side of it, and neither is wrong: the run
    decides where both values are equal up to rounding.

    Args:
        tolerance: Largest difference of equal values, relative to 1 or to the value if larger.
        number: Number of the draw; an even one has the opposite signs of the one before.
        choices: Choices of draw 0 in the order of the computation, which other draws repeat.
        num_taken: Number of decisions taken from the run against the recomputed value.
    """

    tolerance: float
    number: int = 0
    choices: list[Tensor] = field(default_factory=list)
    num_taken: int = 0
    _random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed((self.number + 1) // 2)

    def others(self) -> Iterator[Draw]:
        """Yield the draws with errors."""
        for number in range(1, NUM_DRAWS + 1):
            yield Draw(self.tolerance, number, self.choices)

    @property
    def sign(self) -> float:
        """Sign of the draw; 0 without errors."""
        return self.number and (1.0 if self.number % 2 else -1.0)

    def signed(self, sizes: Tensor) -> Tensor:
        """Return errors of these sizes with random signs."""
        return sizes * (
            self.sign * (torch.randint(0, 2, sizes.shape, generator=self._random) * 2 - 1)
        )

    def move(self, value: Pair, error: Tensor) -> Pair:
        """Return the value with an error, which the run's value shares."""
        shift = self.signed(error)
        return value.map(lambda each: each + shift)

    def above(self, value: Pair, bound: float) -> Tensor:
        """Return whether the value exceeds the bound."""
        return self._decide(value, value.exact > bound, value.run > bound)

    def at_least(self, value: Pair, bound: float) -> Tensor:
        """Return whether the value reaches the bound."""
        return self._decide(value, value.exact >= bound, value.run >= bound)

    def sign_of(self, value: Pair) -> Tensor:
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
        chosen = by_run if (values.exact[by_run] >= limit).all() else by_exact
        return chosen if self.tolerance >= ROUNDED else self.repeated(chosen)

    def repeated(self, choice: Tensor) -> Tensor:
        """Return the choice of draw 0 in its place: another choice is no rounding."""
        self.choices.append(self.choices.pop(0) if self.number else choice)
        return self.choices[-1]


def with_slope_of(value: Tensor, other: Tensor) -> Tensor:
    """Return a value with the derivative of another."""
    return other + (value - other).detach()


def row_lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens of each row, at least 1: [rows, 1]."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1).double()
