"""Findings of an audit, in the order of the computation, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from lightrft.tools.audit.pairs import Pair
from lightrft.tools.audit.tolerances import MEAN_SHARES

# Kinds of tolerance that are relative to each value.
PER_TOKEN = ("logprobs", "replayed", "engine", "weights")
# Factor of the largest change of a single value by rounding of its inputs, and the share of all
# changes that entries of a tensor may exceed it by.
SAFETY, EXCESS = 3, 0.01
EQUAL, DIFFERS, NOT_AUDITED = "equal", "differs", "not audited"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Args:
        quantity: Compared quantity, and its update.
        run, own: Summary of the run's value and of the recomputed value; None without.
        difference, limit: Measured difference, and the largest that rounding explains; None if
            nothing was compared.
        note: Place of the largest difference, or the reason to compare nothing.
    """

    quantity: str
    run: float | None = None
    own: float | None = None
    difference: float | None = None
    limit: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """One of "equal", "differs" and "not audited"."""
        if self.difference is None or self.limit is None:
            return NOT_AUDITED
        # False for NaN, too.
        return EQUAL if self.difference <= self.limit else DIFFERS


# Finding of a comparison by the rounding of each of its values.
Judge = Callable[[Tensor], Finding]


@dataclass(slots=True)
class Doubt:
    """Comparison that its tolerance does not explain, and perhaps rounding of its inputs does.

    Args:
        judge: Function for its finding.
        difference: Values of the run less the recomputed ones, in the draw without errors.
        change: Largest change of each difference in other draws.
    """

    judge: Judge
    difference: Tensor
    change: Tensor


@dataclass(slots=True)
class Findings:
    """Collector of comparisons.

    The step is computed once without errors. If something differs, it is computed again from inputs
    moved by their rounding: a difference that these change by as much is no fault.

    Args:
        tolerances: Tolerances by kind, see `tolerances`.
        by_quantity: Findings so far.
        doubts: Comparisons that differ so far, by quantity.
        is_settling: True while the step is computed again.
    """

    tolerances: Mapping[str, float]
    by_quantity: dict[str, Finding] = field(default_factory=dict)
    doubts: dict[str, Doubt] = field(default_factory=dict)
    is_settling: bool = False

    @property
    def rows(self) -> list[Finding]:
        """Findings so far, in order."""
        return [*self.by_quantity.values()]

    def settle(self) -> None:
        """Judge what differs by its changes."""
        for doubt in self.doubts.values():
            self._set(doubt.judge(doubt.change))

    def _set(self, finding: Finding) -> None:
        before = self.by_quantity.get(finding.quantity)
        if not self.is_settling and before is not None and before.verdict == DIFFERS:
            return  # of two comparisons with one name the first difference stands
        self.by_quantity[finding.quantity] = finding

    def _compare(self, quantity: str, difference: Tensor, judge: Judge) -> None:
        """Judge a comparison, or note how far the rounding of its inputs moves it."""
        if not self.is_settling:
            finding = judge(torch.zeros(()))
            self._set(finding)
            if finding.verdict == DIFFERS:
                zeros = torch.zeros_like(difference)
                self.doubts[quantity] = Doubt(judge, difference, zeros)
        elif quantity in self.doubts:
            doubt = self.doubts[quantity]
            change = (difference - doubt.difference).abs()
            doubt.change = torch.maximum(doubt.change, change)

    def skip(self, quantity: str, why: str) -> None:
        """Note that a quantity cannot be recomputed."""
        if not self.is_settling:
            self._set(Finding(quantity, note=why))

    def number(
        self,
        quantity: str,
        run: float,
        own: Tensor | float,
        kind: str = "number",
        *,
        scale: float = 0.0,
        floor: float = 0.0,
        most: float = math.inf,
    ) -> None:
        """Compare two numbers.

        Args:
            quantity: Name of the quantity.
            run: Value of the run.
            own: Recomputed value; if it has several terms, differences are relative to their sizes.
            kind: Kind of tolerance.
            scale: Number that differences are relative to if it is larger.
            floor: Rounding of the value.
            most: Largest tolerance.
        """
        seen, terms = float(run), torch.as_tensor(own, dtype=torch.float64)
        total, size = float(terms.sum()), float(terms.abs().sum())
        limit = min(self.tolerances[kind], most) * max(size, scale) + floor

        def judge(rounding: Tensor) -> Finding:
            bound = limit + float(rounding.sum())
            return Finding(quantity, seen, total, abs(seen - total), bound)

        self._compare(quantity, seen - terms, judge)

    def exact(self, quantity: str, run: ArrayLike, own: ArrayLike) -> None:
        """Compare ids, masks and counts."""
        run, own = np.asarray(run), np.asarray(own)
        if run.shape != own.shape:
            note = f"shapes {run.shape} and {own.shape}"
            self.add(quantity, float(run.size), float(own.size), math.inf, 0.0, note)
            return
        different = run != own
        note = f"first at {_place(torch.from_numpy(different))}" if different.any() else ""
        totals = (float(run.sum()), float(own.sum()))
        self.add(quantity, *totals, float(different.sum()), 0.0, note)

    def tokens(
        self,
        quantity: str,
        values: Pair,
        mask: Tensor,
        kind: str,
        *,
        scale: float = 1.0,
        floor: Tensor | float = 0.0,
        hint: str = "",
    ) -> None:
        """Compare [rows, seq] values inside the mask; outside, the run's must be 0.

        Args:
            quantity: Name of the quantity.
            values: Values of the run and recomputed values.
            mask: Tokens that count.
            kind: Kind of tolerance.
            scale: Unit of differences for kinds that are not relative to each value.
            floor: Rounding of each value.
            hint: Advice if they differ.
        """
        run, exact = values.run, values.exact
        if run.shape != exact.shape:
            shapes = f"shapes {tuple(run.shape)} and {tuple(exact.shape)}"
            self.add(quantity, None, None, math.inf, 0.0, shapes)
            return
        limit, share = self.tolerances[kind], MEAN_SHARES.get(kind, math.inf)
        size = exact.abs().clamp(min=1.0) if kind in PER_TOKEN else torch.full_like(exact, scale)

        def judge(rounding: Tensor) -> Finding:
            unit = size + (SAFETY * rounding + floor) / limit
            distance = torch.where(mask, (run - exact).abs() / unit, run.abs())
            distance = distance.nan_to_num(math.inf, math.inf)
            largest, mean = float(distance.max()), _mean(distance, mask)
            difference, bound, note = largest, limit, ""
            if largest > limit:
                note = f"largest at {_place(distance == largest)}{hint}"
            elif mean > limit * share:
                difference, bound, note = mean, limit * share, f"mean distance of a token{hint}"
            return Finding(quantity, _mean(run, mask), _mean(exact, mask), difference, bound, note)

        self._compare(quantity, run - exact, judge)

    def states(
        self,
        quantity: str,
        run: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        share: float,
        floor: float = 0.0,
    ) -> None:
        """Compare tensors by the 2-norm of all entries; a limit is this share of the norm."""
        parts = [torch.zeros(0), *((run[name] - value).flatten() for name, value in own.items())]
        difference = torch.cat(parts)
        size, seen = norm_of(own.values()), norm_of(run[name] for name in own)

        def judge(rounding: Tensor) -> Finding:
            excess = (difference.abs() - SAFETY * rounding).clamp(min=0.0)
            limit = share * size + floor + EXCESS * norm_of([rounding])
            return Finding(quantity, seen, size, norm_of([excess]), limit)

        self._compare(quantity, difference, judge)

    def add(
        self,
        quantity: str,
        run: float | None,
        own: float | None,
        difference: float,
        limit: float,
        note: str = "",
    ) -> None:
        """Add a comparison by its difference and limit, which no rounding moves."""
        if not self.is_settling:
            self._set(Finding(quantity, run, own, difference, limit, note))


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the 2-norm over all tensors."""
    return math.sqrt(sum(float((each**2).sum()) for each in tensors))


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if mask.any() else 0.0


def _place(where: Tensor) -> str:
    row, *token = where.nonzero()[0].tolist()
    return f"row {row}, token {token[0]}" if token else f"row {row}"
