"""Data of the report's charts, and the library that draws them, packed."""

import base64
import gzip
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from lightrft.config.toml import write_whole
from lightrft.reporting.metric_table import metric_row

Point = tuple[int, float | None]

# At most three points of each bucket are kept: fewer than 2,000 points a line.
MAX_BUCKETS = 600


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart over steps.

    Args:
        title: Title of the chart.
        kind: "lines", "runs" for one line a run, or "stack" for bars of several parts, which all
            have the same steps.
        series: Points by name, steps ascending; None is a gap.
        unit: Unit of the values, where their metrics do not say it.
        metric: Metric of the series, where their names are not metrics.
    """

    title: str
    kind: Literal["lines", "runs", "stack"]
    series: Mapping[str, Sequence[Point]]
    unit: str = ""
    metric: str = ""

    @property
    def is_zero(self) -> bool:
        """Return whether all values are 0."""
        return all(value == 0 for points in self.series.values() for _, value in points)

    def as_json(self) -> dict[str, object]:
        """Return data of the page's script; `bounds` are the limits of health near the values."""
        names = [self.metric] if self.metric else self.series
        rows = [row for name in names if (row := metric_row(name)) is not None]
        units = {row.unit for row in rows}
        limits = {limit for row in rows for limit in (row.low, row.high) if limit is not None}
        values = [
            value for points in self.series.values() for _, value in points if value is not None
        ]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return {
            "kind": self.kind,
            "series": [self._series(name) for name in self.series],
            # A line at a limit leaves the curves at least half of the chart's height.
            "bounds": sorted(x for x in limits if 2 * low - high <= x <= 2 * high - low),
            "unit": self.unit or (units.pop() if len(units) == 1 else ""),
        }

    def _series(self, name: str) -> dict[str, object]:
        points = self.series[name]
        if self.kind != "stack":
            points = downsample(points, MAX_BUCKETS)
        else:
            points = points[:: max(1, len(points) // MAX_BUCKETS)]
        values = [None if value is None else float(f"{value:.6g}") for _, value in points]
        return {"name": name, "x": [step for step, _ in points], "y": values}


def downsample(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """Return the lowest, the highest and a missing value of every bucket of points, in order.

    Spikes and gaps survive; at most 3 * num_buckets points are returned.
    """
    if len(points) <= num_buckets:
        return list(points)
    kept: list[Point] = []
    for number in range(num_buckets):
        bucket = range(
            len(points) * number // num_buckets, len(points) * (number + 1) // num_buckets
        )
        present = [(value, i) for i in bucket if (value := points[i][1]) is not None]
        chosen = {min(present)[1], max(present)[1]} if present else set()
        chosen |= set([i for i in bucket if points[i][1] is None][:1])
        kept += [points[i] for i in sorted(chosen)]
    return kept


def write_library(folder: Path) -> Path:
    """Write the chart library into a folder, for many pages, unless it is there.

    Returns:
        Its path, which has its version.
    """
    from plotly import __version__
    from plotly.offline import get_plotlyjs

    path = folder / f"lightrft-charts-{__version__}.js"
    if not path.is_file():
        write_whole(path, get_plotlyjs())
    return path


def library_address(library: Path, folder: Path) -> str:
    """Return the address of the chart library in a page of a folder."""
    return quote(os.path.relpath(library.resolve(), folder.resolve()))


@cache
def packed_library() -> str:
    """Return the chart library, compressed (gzip) and in base64."""
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def format_number(value: float | None) -> str:
    """Format with four significant digits; whole numbers up to a million in full."""
    if value is None:
        return "not finite"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"
