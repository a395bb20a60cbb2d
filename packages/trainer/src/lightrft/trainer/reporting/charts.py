"""Geometry of the report's charts; the template turns it into SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Point = tuple[int, float | None]

WIDTH, HEIGHT = 480, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
MAX_BUCKETS = 300
MAX_STRIPS = 120
MAX_DOTS = 40


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with the text that is shown over it."""

    x: float
    y: float
    width: float
    height: float
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One series: polylines between its gaps, and marks of points that are few or alone."""

    name: str
    polylines: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over steps, in the coordinates of a WIDTH x HEIGHT drawing."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    strips: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class StackedBars:
    """Bars of several parts; `bars[i]` are the boxes of bin i from the bottom up."""

    names: tuple[str, ...]
    bars: tuple[tuple[Box, ...], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to positions."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Position of a value, to a tenth of a unit of the drawing."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def format_number(value: float) -> str:
    """Four significant digits; whole numbers up to a million in full."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def draw_lines(title: str, series: Mapping[str, Sequence[Point]]) -> Chart | None:
    """A chart of series over steps; None if no value is finite.

    Args:
        title: Of the chart.
        series: Points by name, steps ascending; None is a gap in the line.
    """
    values = [value for points in series.values() for _, value in points if value is not None]
    if not values:
        return None
    steps = sorted({step for points in series.values() for step, _ in points})
    x_scale, y_scale = _step_scale(steps), _value_scale(min(values), max(values))
    lines = tuple(
        _line(name, points, x_scale, y_scale) for name, points in series.items() if points
    )
    return Chart(
        title,
        lines,
        _ticks(x_scale, whole=True),
        _ticks(y_scale),
        _strips(series, steps, x_scale),
    )


def draw_stack(parts: Mapping[str, Sequence[Point]], *, unit: str) -> StackedBars | None:
    """Stacked bars over steps, each the mean of its bin of steps; None without values.

    Args:
        parts: Non-negative values by name; all have the same steps.
        unit: Of the values, for the texts.
    """
    steps = [step for step, _ in next(iter(parts.values()), ())]
    if not steps:
        return None
    bins = _bins(len(steps), MAX_STRIPS)
    means = [
        [_mean([value for _, value in points[start:stop]]) for points in parts.values()]
        for start, stop in bins
    ]
    highest = max(map(sum, means))
    x_scale = _step_scale(steps)
    y_scale = Scale(0.0, highest * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / len(bins)
    bars = []
    for position, ((start, stop), heights) in enumerate(zip(bins, means, strict=True)):
        boxes, below = [], 0.0
        label = _step_label(steps[start], steps[stop - 1])
        for name, height in zip(parts, heights, strict=True):
            top = y_scale(below + height)
            box_height = round(y_scale(below) - top, 1)
            title = f"{label}: {name} {format_number(height)} {unit}"
            x = round(LEFT + position * width, 1)
            boxes.append(Box(x, top, round(max(width - 0.6, 0.4), 1), box_height, title))
            below += height
        bars.append(tuple(boxes))
    return StackedBars(tuple(parts), tuple(bars), _ticks(x_scale, whole=True), _ticks(y_scale))


def downsample(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """The lowest, the highest and a missing value of every bucket of points, in order.

    Spikes survive, and so do gaps; at most 3 * num_buckets points are returned.
    """
    if len(points) <= num_buckets:
        return list(points)
    kept: list[Point] = []
    for start, stop in _bins(len(points), num_buckets):
        bucket = range(start, stop)
        present = [(value, i) for i in bucket if (value := points[i][1]) is not None]
        chosen = {min(present)[1], max(present)[1]} if present else set()
        chosen |= set([i for i in bucket if points[i][1] is None][:1])
        kept += [points[i] for i in sorted(chosen)]
    return kept


def _line(name: str, points: Sequence[Point], x_scale: Scale, y_scale: Scale) -> Line:
    segments: list[list[tuple[float, float]]] = [[]]
    for step, value in downsample(points, MAX_BUCKETS):
        if value is None:
            segments.append([])
        else:
            segments[-1].append((x_scale(step), y_scale(value)))
    is_sparse = len(points) <= MAX_DOTS
    dots = [dot for part in segments if is_sparse or len(part) == 1 for dot in part]
    polylines = [" ".join(f"{x:g},{y:g}" for x, y in part) for part in segments if len(part) > 1]
    last = points[-1][1]
    return Line(
        name, tuple(polylines), tuple(dots), "not finite" if last is None else format_number(last)
    )


def _strips(
    series: Mapping[str, Sequence[Point]], steps: Sequence[int], x_scale: Scale
) -> tuple[Box, ...]:
    """Invisible columns that show the values of their steps, the last one of several."""
    tables = {name: dict(points) for name, points in series.items()}
    strips = []
    bins = _bins(len(steps), MAX_STRIPS)
    for start, stop in bins:
        parts = [_step_label(steps[start], steps[stop - 1])]
        for name, table in tables.items():
            found = [table[step] for step in steps[start:stop] if step in table]
            if found:
                value = found[-1]
                parts.append(f"{name} {'not finite' if value is None else format_number(value)}")
        left = x_scale(steps[start] - 0.5)
        right = x_scale(steps[stop - 1] + 0.5)
        left, right = max(left, LEFT), min(right, WIDTH - RIGHT)
        strips.append(
            Box(left, TOP, round(right - left, 1), HEIGHT - TOP - BOTTOM, "\n".join(parts))
        )
    return tuple(strips)


def _step_label(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _bins(num_items: int, max_bins: int) -> list[tuple[int, int]]:
    """Start and stop of at most `max_bins` runs of items that differ in size by at most 1."""
    count = min(num_items, max_bins)
    edges = [num_items * i // count for i in range(count + 1)] if count else []
    return list(pairwise(edges))


def _mean(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


def _step_scale(steps: Sequence[int]) -> Scale:
    low, high = steps[0], steps[-1]
    pad = 0.5 if high == low else 0.0
    return Scale(low - pad, high + pad, LEFT, WIDTH - RIGHT)


def _value_scale(low: float, high: float) -> Scale:
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    bottom = max(0.0, low - pad) if low >= 0 else low - pad  # no negative shares or lengths
    return Scale(bottom, high + pad, HEIGHT - BOTTOM, TOP)


def _ticks(scale: Scale, *, whole: bool = False) -> tuple[Tick, ...]:
    """About five marks at round numbers."""
    rough = (scale.high - scale.low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    size = max(1.0, size) if whole else size
    first, last = math.ceil(scale.low / size), math.floor(scale.high / size)
    return tuple(Tick(scale(i * size), f"{i * size:.6g}") for i in range(first, last + 1))
