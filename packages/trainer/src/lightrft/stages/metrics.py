"""Metrics of one step, reduced over ranks in one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightrft.algorithms.moments import (
    PairedMoments,
    effective_sample_fraction,
    effective_sample_sums,
    paired_moments,
)
from lightrft.strategy.distributed.process_end import NumericsError

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


# How one accumulated number is joined over micro batches and ranks.
Reduction = Literal["sum", "max", "min"]
_JOINS: dict[Reduction, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


_NOTHING: dict[Reduction, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf}


class StepMetrics:
    """Accumulator of metrics on this rank; `reduce` makes them exact over all ranks.

    A mean is kept as a sum and a count, so all tokens (or rows, or steps) weigh the same. All ranks
    must record the same names; a rank without data records a count of 0. A mean over nothing is
    left out of the result.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, Reduction], list[float | Tensor]] = {}
        self._derived: dict[str, tuple[int, Callable[[Tensor], float | None]]] = {}
        self._pairs: dict[str, tuple[Callable[[PairedMoments], float | None], list[Tensor]]] = {}

    def add_mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add `total` over `count` items to the mean called `name`."""
        self.add_sums(name, (total, count), _mean)

    def add_masked_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the entries of `values` [batch, seq] where `mask` is true."""
        kept = torch.where(mask, values.detach().double(), 0.0)
        self.add_mean(name, kept.sum(), mask.sum())

    def add_masked_means(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add several masked means by name; see `add_masked_mean`."""
        for name, each in values.items():
            self.add_masked_mean(name, each, mask)

    def add_sums(
        self,
        name: str,
        sums: Tensor | Sequence[float | Tensor],
        finish: Callable[[Tensor], float | None],
    ) -> None:
        """Add sums; `finish` turns the vector of their totals over all ranks into the metric.

        A metric of None is left out.
        """
        for index, value in enumerate(sums):
            self._add(f"{name}/{index}", value)
        self._derived[name] = (len(sums), finish)

    def add_count(self, name: str, count: float | Tensor) -> None:
        """Add to a number that is summed over micro batches, optimizer steps and ranks."""
        self.add_sums(name, (count,), float)

    def add_pairs(
        self,
        name: str,
        first: Tensor,
        second: Tensor,
        mask: Tensor,
        finish: Callable[[PairedMoments], float | None],
    ) -> None:
        """Add pairs of entries [batch, seq] where `mask` is true.

        `finish` turns their moments over all ranks into the metric; None is left out.
        """
        parts = self._pairs.setdefault(name, (finish, []))[1]
        parts.append(paired_moments(first, second, mask))

    def add_effective_samples(self, name: str, weights: Tensor, mask: Tensor) -> None:
        """Add weights [batch, seq] whose effective share of samples is the metric."""
        self.add_sums(name, effective_sample_sums(weights, mask), effective_sample_fraction)

    def add_max(self, name: str, value: float | Tensor) -> None:
        """Add to a maximum over micro batches, optimizer steps and ranks; -inf means no value."""
        self._add(name, value, "max")

    def add_min(self, name: str, value: float | Tensor) -> None:
        """Add to a minimum over micro batches, optimizer steps and ranks; inf means no value."""
        self._add(name, value, "min")

    def forget(self) -> None:
        """Drop the values and keep the names, as on a rank without data."""
        for (_, kind), values in self.values.items():
            values[:] = [_NOTHING[kind]]
        for _, parts in self._pairs.values():
            parts[:] = [torch.zeros_like(parts[0])]

    def reduce(self, context: DistributedContext) -> dict[str, float]:
        """Join the metrics of all ranks with one collective.

        Returns:
            Name -> value, equal on all ranks, names sorted.
        """
        keys = sorted(self.values)
        local = [_joined(map(float, self.values[key]), key[1])[None] for key in keys]
        pairs = sorted(self._pairs.items())
        local += [
            PairedMoments.joined(torch.stack(parts).cpu()).to_tensor() for _, (_, parts) in pairs
        ]
        flat = torch.cat(local)
        rows = context.all_gather(flat).reshape(-1, len(flat))  # [ranks, numbers]
        joined = {
            key: float(_joined(rows[:, column].tolist(), key[1])) for column, key in enumerate(keys)
        }
        metrics = {
            name: value
            for (name, kind), value in joined.items()
            if (kind, value) not in (("max", -math.inf), ("min", math.inf)) and kind != "sum"
        }
        for name, (size, finish) in self._derived.items():
            sums = [joined[f"{name}/{i}", "sum"] for i in range(size)]
            value = finish(torch.tensor(sums, dtype=torch.float64))
            if value is not None:
                metrics[name] = value
        for index, (name, (finish_pairs, _)) in enumerate(pairs):
            begin = len(keys) + 6 * index
            value = finish_pairs(PairedMoments.joined(rows[:, begin : begin + 6].double()))
            if value is not None:
                metrics[name] = value
        return {name: metrics[name] for name in sorted(metrics)}

    def _add(self, name: str, value: float | Tensor, join: Reduction = "sum") -> None:
        # Kept as a tensor: reading it here would wait for the device once per metric and batch.
        kept = value.detach() if isinstance(value, torch.Tensor) else value
        self.values.setdefault((name, join), []).append(kept)


def _mean(sums: Tensor) -> float | None:
    total, count = sums.tolist()
    return total / count if count > 0 else None


def _joined(values: Iterable[float], join: Reduction) -> Tensor:
    return _JOINS[join](torch.tensor(list(values), dtype=torch.float64))


class RunAlarmError(NumericsError):
    """An alarm ended a run (`stop_on_alarm`); model, checkpoint and summary are written."""
