"""Data of the report's interactive charts, and the library that draws them, packed."""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lightrft.trainer.reporting.charts import downsample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightrft.trainer.reporting.charts import Point
    from lightrft.trainer.reporting.metric_table import MetricRow

MAX_BUCKETS = 600
"""At most three points of each bucket are kept: fewer than 2,000 points a line."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One interactive chart, as the page's script reads it.

    Args:
        kind: "lines", or "stack" for bars of several parts.
        series: Name, steps and values of each; None is a gap.
        bounds: Ends of the healthy range that lie near the values.
        unit: Of the values.
    """

    kind: str
    series: tuple[Mapping[str, object], ...]
    bounds: tuple[float, ...] = ()
    unit: str = ""

    def as_json(self) -> dict[str, object]:
        """For the page's data block."""
        return {
            "kind": self.kind,
            "series": list(self.series),
            "bounds": list(self.bounds),
            "unit": self.unit,
        }


def plot_lines(series: Mapping[str, Sequence[Point]], rows: Mapping[str, MetricRow]) -> Plot:
    """Lines over steps.

    Args:
        series: Points by name, steps ascending.
        rows: What is known about these metrics.
    """
    kept = {name: downsample(points, MAX_BUCKETS) for name, points in series.items()}
    values = [value for points in kept.values() for _, value in points if value is not None]
    limits = {limit for row in rows.values() for limit in (row.low, row.high) if limit is not None}
    units = {row.unit for row in rows.values()}
    return Plot(
        "lines",
        tuple(_series(name, points) for name, points in kept.items()),
        tuple(sorted(limit for limit in limits if _is_near(limit, values))),
        units.pop() if len(units) == 1 else "",
    )


def plot_stack(parts: Mapping[str, Sequence[Point]], *, unit: str) -> Plot:
    """Stacked bars over steps.

    Args:
        parts: Values by name; all have the same steps.
        unit: Of the values.
    """
    steps = [step for step, _ in next(iter(parts.values()))]
    every = max(1, len(steps) // MAX_BUCKETS)
    kept = {name: points[::every] for name, points in parts.items()}
    return Plot("stack", tuple(_series(name, points) for name, points in kept.items()), (), unit)


@cache
def packed_library() -> str | None:
    """The chart library, compressed (gzip) and in base64; None where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _series(name: str, points: Sequence[Point]) -> dict[str, object]:
    values = [None if value is None else float(f"{value:.6g}") for _, value in points]
    return {"name": name, "x": [step for step, _ in points], "y": values}


def _is_near(limit: float, values: Sequence[float]) -> bool:
    """Whether a line at `limit` leaves the curves at least half of the chart's height."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return low - (high - low) <= limit <= high + (high - low)
