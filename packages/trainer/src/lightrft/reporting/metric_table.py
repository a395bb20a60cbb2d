"""Meanings of the metrics of a run: `metrics.toml`, for the report and the documentation."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightrft.config import ConfigError

# The stages of a step; each has a metric `<stage>_seconds`, the slowest rank's.
STAGES = ("rollout", "reward", "exchange", "forward", "train", "weight_sync")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    Args:
        name: Name as in metrics.jsonl; one that ends in "/*" stands for its whole group.
        meaning: Meaning in one sentence.
        unit: Unit of its values; "" for pure numbers.
        low, high: Bounds of the healthy range; None is unbounded.
        better: "larger" or "smaller" where one of them is better; else "".
    """

    name: str
    meaning: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    better: Literal["larger", "smaller", ""] = ""

    @property
    def healthy_range(self) -> str:
        """Bounds in words; "" where none is known."""
        match self.low, self.high:
            case None, None:
                return ""
            case None, high:
                return f"at most {high:g}"
            case low, None:
                return f"at least {low:g}"
            case low, high:
                return f"{low:g} to {high:g}"


# Start of the note on an out-of-memory exception with planned and measured memory.
PEAK_NOTE = "memory: "
# Stages of a step in which a planned phase reaches its peak.
_STAGES_OF = {
    "rollout": ("rollout",),
    "score": ("forward", "score"),
    "train": ("train",),
    "sync": ("weight_sync",),
}


def memory_peaks(
    planned: Mapping[str, object], steps: Iterable[Mapping[str, object]]
) -> dict[str, dict[str, float]]:
    """Return peak bytes of each phase on the fullest rank: planned, and measured if it ran.

    On a GPU the measured bytes are `torch.cuda.max_memory_allocated`. On a CPU they are what the
    process holds at the end of the phase.

    Args:
        planned: Bytes by phase, of `run.json`.
        steps: Metrics of each step.
    """
    peaks = {name: {"planned_bytes": float(str(value))} for name, value in planned.items()}
    for step in steps:
        for phase, stages in _STAGES_OF.items():
            measured = [step.get(f"memory/{stage}_gb") for stage in stages]
            most = max((each for each in measured if isinstance(each, int | float)), default=0.0)
            if most:
                peak = peaks.setdefault(phase, {})
                peak["measured_bytes"] = max(peak.get("measured_bytes", 0.0), most * 2**30)
    return peaks


def planned_phase(stage: str) -> str:
    """Return the planned phase of a step's stage, or of a phase within it; "" for others."""
    return next((name for name, stages in _STAGES_OF.items() if stage in stages), "")


def _read_table() -> dict[str, MetricRow]:
    rows = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
    return {name: MetricRow(name, **row) for name, row in rows.items()}


METRICS = _read_table()


def metric_row(name: str) -> MetricRow | None:
    """Return a metric's row, or its group's, or that of a step's metric; None if it is unknown."""
    group = f"{name.split('/')[0]}/*" if "/" in name else name
    matched = METRICS.get(name, METRICS.get(group))
    held_out = name.removeprefix("eval/")
    if matched is None and held_out != name:
        row = metric_row(held_out)
        # Bounds are those of steps.
        matched = row and replace(row, name=name, low=None, high=None)
    return matched


def larger_is_better(metric: str) -> bool:
    """Return whether larger values of an evaluation's metric are better; assumed if unknown.

    Raises:
        ConfigError: Neither larger nor smaller values are.
    """
    row = METRICS.get(metric) or METRICS.get(f"{metric.split('/')[0]}/*")
    if row is not None and not row.better:
        known = ", ".join(n for n, each in METRICS.items() if each.better and "*" not in n)
        raise ConfigError(
            f"best_metric: neither larger nor smaller values of {metric} are better; give one of "
            f"{known}"
        )
    return row is None or row.better == "larger"
