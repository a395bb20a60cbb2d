"""Findings of an audit, in the order of the computation, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from lightrft.tools.audit.tolerances import MEAN_SHARES

# Kinds of tolerance that are relative to each value.
PER_TOKEN = ("logprobs", "replayed", "engine", "weights")
EQUAL, DIFFERS, NOT_AUDITED = "equal", "differs", "not audited"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Args:
        quantity: Compared quantity, and its update.
        run, own: Summary of the run's value and of the recomputed value; None without.
        difference, limit: Measured difference, and the largest that rounding explains.
        verdict: "equal", "differs" or "not audited".
        note: Place of the largest difference, or the reason to compare nothing.
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
    """Collector of comparisons.

    Args:
        tolerances: Tolerances by kind, see `tolerances`.
        rows: Findings so far.
    """

    tolerances: Mapping[str, float]
    rows: list[Finding] = field(default_factory=list)

    def skip(self, quantity: str, why: str) -> None:
        """Note that a quantity cannot be recomputed."""
        self.rows.append(Finding(quantity, None, None, None, None, NOT_AUDITED, why))

    def number(
        self,
        quantity: str,
        run: float,
        own: float,
        kind: str = "number",
        *,
        scale: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        """Compare two numbers; the difference is relative to `scale` if that is larger."""
        limit = self.tolerances[kind] * max(abs(own), scale) + floor
        self.add(quantity, float(run), float(own), float(abs(run - own)), limit)

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
        run: Tensor,
        own: Tensor,
        mask: Tensor,
        kind: str,
        *,
        scale: float = 1.0,
        floor: Callable[[], Tensor | float] = float,
    ) -> None:
        """Compare [rows, seq] values inside the mask; outside, the run's must be 0.

        Args:
            quantity: Name of the quantity.
            run, own: Values of the run and recomputed values.
            mask: Tokens that count.
            kind: Kind of tolerance.
            scale: Unit of differences for kinds that are not relative to each value.
            floor: Rounding of each value; called only if the tolerance alone is exceeded.
        """
        if run.shape != own.shape:
            shapes = f"shapes {tuple(run.shape)} and {tuple(own.shape)}"
            self.add(quantity, None, None, math.inf, 0.0, shapes)
            return
        limit, share = self.tolerances[kind], MEAN_SHARES.get(kind, math.inf)
        unit = own.abs().clamp(min=1.0) if kind in PER_TOKEN else torch.full_like(own, scale)
        distance = torch.where(mask, (run - own).abs() / unit, run.abs()).nan_to_num(
            math.inf, math.inf
        )
        if float(distance.max()) > limit or _mean(distance, mask) > limit * share:
            unit = unit + floor() / limit
            distance = torch.where(mask, (run - own).abs() / unit, run.abs()).nan_to_num(
                math.inf, math.inf
            )
        largest, mean = float(distance.max()), _mean(distance, mask)
        note = f"largest at {_place(distance == largest)}" if largest > limit else ""
        if largest <= limit < mean / share:
            largest, limit, note = mean, limit * share, "mean distance of a token"
        self.add(quantity, _mean(run, mask), _mean(own, mask), largest, limit, note)

    def hint(self, text: str) -> None:
        """Add advice to the last finding if it differs."""
        last = self.rows[-1]
        if last.verdict == DIFFERS:
            self.rows[-1] = replace(last, note=f"{last.note}; {text}")

    def add(
        self,
        quantity: str,
        run: float | None,
        own: float | None,
        difference: float,
        limit: float,
        note: str = "",
    ) -> None:
        """Add a comparison by its difference and limit."""
        # False for NaN, too.
        verdict = EQUAL if difference <= limit else DIFFERS
        self.rows.append(Finding(quantity, run, own, difference, limit, verdict, note))


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if mask.any() else 0.0


def _place(where: Tensor) -> str:
    row, *token = where.nonzero()[0].tolist()
    return f"row {row}, token {token[0]}" if token else f"row {row}"
