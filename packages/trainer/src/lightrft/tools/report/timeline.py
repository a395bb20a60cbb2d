"""Chosen steps of a run as bars of each rank, by the times in `logs/timeline_N.jsonl`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lightrft.reporting.files import LOG_FOLDER, TIMELINE_BEGIN, TIMELINE_PREFIX, JsonLines

MAX_STEPS = 12
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of a step as its rank wrote it: see `strategy.distributed.deadlines.SpanSink`."""

    step: int
    stage: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage of one rank within a step.

    Args:
        stage: Name of the stage.
        left, width: Position and width in percent of the step.
        seconds: Seconds that it took.
    """

    stage: str
    left: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """A step on all ranks.

    Args:
        step: Number of the step.
        seconds: Seconds from the first stage of the first rank that trains to the end of its last.
        bars: Bars of each rank.
        busy: Share of the step that the rank spent in its stages but not in `wait`.
    """

    step: int
    seconds: float
    bars: dict[int, list[Bar]]
    busy: dict[int, float]


def read_timelines(folder: Path) -> dict[int, list[Span]]:
    """Return the spans of every rank that has a file, ascending by rank and time.

    Steps that were repeated after a resume count once, by their last run.
    """
    spans: dict[int, list[Span]] = {}
    for path in (folder / LOG_FOLDER).glob(f"{TIMELINE_PREFIX}*.jsonl"):
        rank = path.stem.removeprefix(TIMELINE_PREFIX)
        if rank.isdecimal() and len(rank) < 9:
            spans[int(rank)] = _read(path)
    return dict(sorted(spans.items()))


def _read(path: Path) -> list[Span]:
    spans: list[Span] = []
    has_begun = True
    for step, entry in JsonLines(path):
        stage, *times = (entry.get(name) for name in ("stage", "start", "end"))
        start, end = (float(t) if isinstance(t, int | float) else math.nan for t in times)
        has_begun |= stage == TIMELINE_BEGIN
        if not isinstance(stage, str) or not start <= end < math.inf:
            continue
        if has_begun:
            spans, has_begun = [span for span in spans if span.step < step], False
        spans.append(Span(step, stage, start, end))
    return sorted(spans, key=lambda span: span.start)


def step_timelines(folder: Path) -> list[StepTimeline]:
    """Return the slowest step of a run and others at equal distances, ascending."""
    spans = read_timelines(folder)
    windows: dict[int, tuple[float, float]] = {}
    # The first rank that trains dates the steps: ranks that only generate work on another step
    # meanwhile, and an earlier process may have left files of more ranks.
    first = next((r for r in spans.values() if any(s.stage == "train" for s in r)), [])
    for span in first:
        start, end = windows.get(span.step, (span.start, span.end))
        windows[span.step] = min(start, span.start), max(end, span.end)
    windows = {step: (a, b) for step, (a, b) in sorted(windows.items()) if b > a}
    shown = dict(list(spans.items())[:MAX_RANKS])
    return [_timeline(step, *windows[step], shown) for step in _choose(windows)]


def _choose(windows: dict[int, tuple[float, float]]) -> Iterable[int]:
    steps = list(windows)
    if len(steps) <= MAX_STEPS:
        return steps
    slowest = max(steps, key=lambda step: windows[step][1] - windows[step][0])
    distance = (len(steps) - 1) / (MAX_STEPS - 2)
    return sorted({slowest, *(steps[round(i * distance)] for i in range(MAX_STEPS - 1))})


def _timeline(step: int, start: float, end: float, spans: dict[int, list[Span]]) -> StepTimeline:
    seconds, bars, busy = end - start, {}, {}
    for rank, rank_spans in spans.items():
        inside = [s for s in rank_spans if s.end > start and s.start < end]
        cut = [(s.stage, max(start, s.start), min(end, s.end)) for s in inside]
        bars[rank] = [
            Bar(name, 100 * (a - start) / seconds, 100 * (b - a) / seconds, b - a)
            for name, a, b in cut
        ]
        busy[rank] = _busy_seconds(cut) / seconds
    return StepTimeline(step, seconds, bars, busy)


def _busy_seconds(stages: Sequence[tuple[str, float, float]]) -> float:
    """Return the seconds in which a stage runs and no wait; a wait may lie inside of a stage."""
    times = sorted({time for _, *pair in stages for time in pair})
    total = 0.0
    for start, end in pairwise(times):
        running = {name for name, a, b in stages if a <= start and end <= b}
        total += (end - start) if running and "wait" not in running else 0.0
    return total
