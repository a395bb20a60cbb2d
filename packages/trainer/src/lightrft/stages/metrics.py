"""Metrics of one step, reduced over ranks in one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrft.algorithms.moments import PairedMoments, join_moments, paired_moments
from lightrft.strategy.distributed.process_end import NumericsError

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


# Function from [parts, numbers] float64 to [numbers], over micro batches and over ranks.
Join = Callable[[Tensor], Tensor]
Finish = Callable[[Tensor], float | None]


def _sums(parts: Tensor) -> Tensor:
    # Each number alone: the order of summation depends on the layout.
    return torch.stack([numbers.sum() for numbers in parts.T.contiguous()])


@dataclass(slots=True)
class _Metric:
    """Parts of a metric on this rank.

    Args:
        finish: Function from the numbers over all ranks to the metric; None is left out.
        join: Joins the parts.
        nothing: Each number of a rank without data.
        parts: Numbers of each addition. Tensors stay on their device: reading each at once would
            wait for the device once per metric and batch.
    """

    finish: Finish
    join: Join = _sums
    nothing: float = 0.0
    parts: list[Tensor | list[float | Tensor]] = field(default_factory=list)

    def local(self) -> Tensor:
        """Return the joined numbers of this rank."""
        parts = [
            part.double().cpu()
            if isinstance(part, Tensor)
            else torch.tensor([float(number) for number in part], dtype=torch.float64)
            for part in self.parts
        ]
        return self.join(torch.stack(parts))


class StepMetrics:
    """Accumulator of metrics on this rank; `reduce` makes them exact over all ranks.

    A mean is kept as a sum and a count, so all tokens (or rows, or steps) weigh the same. All ranks
    must record the same names; a rank without data records a count of 0. A mean over nothing is
    left out of the result.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, _Metric] = {}

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

    def add_sums(self, name: str, sums: Tensor | Sequence[float | Tensor], finish: Finish) -> None:
        """Add sums; `finish` turns the vector of their totals over all ranks into the metric.

        A metric of None is left out.
        """
        self._add(name, _Metric(finish), sums)

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
        metric = _Metric(lambda numbers: finish(PairedMoments.of(numbers)), join_moments)
        self._add(name, metric, paired_moments(first, second, mask))

    def add_max(self, name: str, value: float | Tensor) -> None:
        """Add to a maximum over micro batches, optimizer steps and ranks; -inf means no value."""
        self._add(name, _extreme(torch.amax, -math.inf), (value,))

    def add_min(self, name: str, value: float | Tensor) -> None:
        """Add to a minimum over micro batches, optimizer steps and ranks; inf means no value."""
        self._add(name, _extreme(torch.amin, math.inf), (value,))

    def forget(self) -> None:
        """Drop the values and keep the names, as on a rank without data."""
        for metric in self._metrics.values():
            metric.parts[:] = [[metric.nothing] * len(metric.parts[0])]

    def reduce(self, context: DistributedContext) -> dict[str, float]:
        """Join the metrics of all ranks with one collective.

        Returns:
            Name -> value, equal on all ranks, names sorted.
        """
        names = sorted(self._metrics)
        local = [self._metrics[name].local() for name in names]
        flat = torch.cat(local)
        rows = context.all_gather(flat).cpu().reshape(-1, len(flat))  # [ranks, numbers]
        metrics = {}
        *stops, _ = accumulate(map(len, local))
        by_name = torch.tensor_split(rows, stops, dim=1)
        for name, parts in zip(names, by_name, strict=True):
            metric = self._metrics[name]
            value = metric.finish(metric.join(parts))
            if value is not None:
                metrics[name] = value
        return metrics

    def _add(self, name: str, metric: _Metric, numbers: Tensor | Sequence[float | Tensor]) -> None:
        kept = (
            numbers.detach()
            if isinstance(numbers, Tensor)
            else [each.detach() if isinstance(each, Tensor) else each for each in numbers]
        )
        self._metrics.setdefault(name, metric).parts.append(kept)


def _mean(sums: Tensor) -> float | None:
    total, count = sums.tolist()
    return total / count if count > 0 else None


def _extreme(join: Callable[[Tensor, int], Tensor], nothing: float) -> _Metric:
    """Return a metric of largest or smallest values; it is left out where no rank has one."""
    return _Metric(
        lambda value: None if value == nothing else float(value),
        lambda parts: join(parts, 0),
        nothing,
    )


class RunAlarmError(NumericsError):
    """An alarm ended a run (`stop_on_alarm`); model, checkpoint and summary are written."""
