"""What an audit found, quantity by quantity in the order of the chain, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lightrft.tools.audit.record import Array, Flags
from lightrft.tools.audit.tolerances import MEAN_SHARES

# Kinds of tolerance that are relative to each value itself.
PER_TOKEN = ("logprobs", "replayed", "engine", "weights")
EQUAL, DIFFERS, NOT_AUDITED = "equal", "differs", "not audited"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Args:
        quantity: What was compared, and at which update.
        run, own: A number that stands for the run's and for the recomputed value; None without.
        difference, limit: What was measured, and up to which it is rounding.
        verdict: "equal", "differs" or "not audited".
        note: Where the largest difference is, or why nothing was compared.
    """

    quantity: str
    run: float | None
    own: float | None
    difference: float | None
    limit: float | None
    verdict: str
    note: str = ""


@dataclass(slots=True)
class Findings:
    """Collects comparisons.

    Args:
        tolerances: By kind, see `tolerances`.
        rows: So far.
    """

    tolerances: Mapping[str, float]
    rows: list[Finding] = field(default_factory=list)

    @property
    def first_difference(self) -> Finding | None:
        """Where the run differs first; None if it does not."""
        return next((row for row in self.rows if row.verdict == DIFFERS), None)

    def skip(self, quantity: str, why: str) -> None:
        """Say that something cannot be recomputed."""
        self.rows.append(Finding(quantity, None, None, None, None, NOT_AUDITED, why))

    def number(
        self, quantity: str, run: float, own: float, kind: str = "number", *, scale: float = 0.0
    ) -> None:
        """Compare two numbers; `scale` is what the difference is relative to if larger."""
        limit = self.tolerances[kind] * max(abs(own), scale, 1e-30)
        self._add(quantity, run, own, abs(run - own), limit)

    def exact(self, quantity: str, run: np.ndarray, own: np.ndarray) -> None:
        """Compare ids, masks and counts."""
        if run.shape != own.shape:
            note = f"shapes {run.shape} and {own.shape}"
            self._add(quantity, float(run.size), float(own.size), math.inf, 0.0, note)
            return
        different = run != own
        note = f"first at {_place(different)}" if different.any() else ""
        totals = (float(run.sum()), float(own.sum()))
        self._add(quantity, *totals, float(different.sum()), 0.0, note)

    def tokens(
        self,
        quantity: str,
        run: Array,
        own: Array,
        mask: Flags,
        kind: str,
        *,
        scale: float = 1.0,
        hint: str = "",
    ) -> None:
        """Compare [rows, seq] values: of the mask closely, 0 outside of it.

        Args:
            quantity: What.
            run, own: Values.
            mask: Where they count.
            kind: Of the tolerance.
            scale: What differences of "advantages" are relative to.
            hint: Where to look if they differ.
        """
        if run.shape != own.shape:
            self._add(quantity, None, None, math.inf, 0.0, f"shapes {run.shape} and {own.shape}")
            return
        unit = np.maximum(1.0, np.abs(own)) if kind in PER_TOKEN else scale
        distance = np.where(mask, np.abs(run - own) / unit, np.abs(run))
        distance = np.where(np.isnan(distance), np.inf, distance)
        largest = float(distance.max(initial=0.0))
        limit = self.tolerances[kind]
        means = [float(each[mask].mean()) if mask.any() else 0.0 for each in (run, own)]
        note = f"largest at {_place(distance == largest)}" if largest > limit else ""
        if kind in MEAN_SHARES and mask.any() and largest <= limit:
            mean = float(distance[mask].mean())
            if mean > limit * MEAN_SHARES[kind]:
                largest, limit, note = mean, limit * MEAN_SHARES[kind], "mean distance of a token"
        note = f"{note}; {hint}" if note and hint else note
        self._add(quantity, means[0], means[1], largest, limit, note)

    def share(
        self, quantity: str, run: float, own: float, error: float, limit: float, note: str = ""
    ) -> None:
        """Compare by a difference and a limit that the caller knows."""
        self._add(quantity, run, own, error, limit, note)

    def _add(
        self,
        quantity: str,
        run: float | None,
        own: float | None,
        difference: float,
        limit: float,
        note: str = "",
    ) -> None:
        # Also false for NaN.
        verdict = EQUAL if difference <= limit else DIFFERS
        self.rows.append(Finding(quantity, run, own, difference, limit, verdict, note))


def _place(where: Flags) -> str:
    first = np.argwhere(where)[0].tolist()
    return f"row {first[0]}, token {first[1]}" if len(first) == 2 else f"row {first[0]}"
