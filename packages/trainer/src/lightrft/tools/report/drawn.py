"""Charts of the prompts that a run drew: accuracy by difficulty, and groups without a signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lightrft.config.files import FileError, lines_of, parse_json, typed
from lightrft.tools.report.charts import Chart, Point

# Upper bounds of the accuracy of a prompt's first group.
DIFFICULTIES = {"hard at first": 1 / 3, "between": 2 / 3, "easy at first": 1.0}
MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Groups of one step, in the order of the step.

    Args:
        step: Number of the step.
        num_prompts: Prompts of the run.
        rows: Row in the data of each group's prompt.
        accuracies: Mean accuracy of each group's samples; None where none was scored.
        without_signal: Whether all samples of a group were equally accurate.
    """

    step: int
    num_prompts: int
    rows: tuple[int, ...]
    accuracies: tuple[float | None, ...]
    without_signal: tuple[bool, ...]


def read_draws(path: Path) -> list[StepDraws]:
    """Return the steps of a file that may be cut off; lines that are none are left out."""
    steps = []
    for line in lines_of(path) if path.is_file() else ():
        try:
            each = typed(StepDraws, parse_json(line, path), path)
        except FileError:
            continue
        if len(each.rows) == len(each.accuracies) == len(each.without_signal):
            steps.append(each)
    return steps


def charts_of_draws(steps: Sequence[StepDraws]) -> list[Chart]:
    """Return the charts of accuracy by difficulty and of groups without a signal."""
    first: dict[int, float] = {}
    accuracy: dict[str, list[Point]] = {name: [] for name in DIFFICULTIES}
    without: dict[str, list[Point]] = {"solved": [], "not solved": []}
    for each in steps:
        by_class: dict[str, list[float]] = {name: [] for name in DIFFICULTIES}
        for row, value in zip(each.rows, each.accuracies, strict=True):
            if value is None:
                continue
            if row in first:
                by_class[_difficulty(first[row])].append(value)
            first.setdefault(row, value)
        for name, values in by_class.items():
            if values:
                accuracy[name].append((each.step, fmean(values)))
        flat = [
            value
            for value, is_flat in zip(each.accuracies, each.without_signal, strict=True)
            if is_flat and value is not None
        ]
        num_solved, size = sum(value > 0.5 for value in flat), max(len(each.rows), 1)
        without["solved"].append((each.step, num_solved / size))
        without["not solved"].append((each.step, (len(flat) - num_solved) / size))
    charts = {
        "Accuracy of prompts drawn again, by their first group": accuracy,
        "Groups without a signal": without,
    }
    return [
        Chart(title, "lines", {name: points for name, points in series.items() if points})
        for title, series in charts.items()
        if any(series.values())
    ]


def _difficulty(accuracy: float) -> str:
    return next(name for name, bound in DIFFICULTIES.items() if accuracy <= bound or bound == 1.0)


def draw_sentence(steps: Sequence[StepDraws]) -> str:
    """Return how many prompts were drawn, how often, and which ones most often."""
    counts = Counter(row for each in steps for row in each.rows)
    if not counts:
        return ""
    num_prompts = max(each.num_prompts for each in steps)
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_SHOWN]
    shown = ", ".join(f"row {row} {count}x" for row, count in most)
    return (
        f"{len(counts)} of {num_prompts} in {counts.total()} groups; most often {shown}; "
        f"fewest {min(counts.values())}x"
    )
