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
        name: As in metrics.jsonl; a name that ends in "/*" stands for all of its group.
        meaning: What it says, in one sentence.
        unit: Of its values; "" for pure numbers.
        low, high: Bounds of the healthy range; None is unbounded.
        better: "larger" or "smaller" where one of them is; "" where neither is, or nobody asks.
    """

    name: str
    meaning: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    better: Literal["larger", "smaller", ""] = ""

    @property
    def healthy_range(self) -> str:
        """The bounds in words; "" where none is known."""
        match self.low, self.high:
            case None, None:
                return ""
            case None, high:
                return f"at most {high:g}"
            case low, None:
                return f"at least {low:g}"
            case low, high:
                return f"{low:g} to {high:g}"


# Begins the note of an exception for lack of memory that says what was planned and measured.
PEAK_NOTE = "memory: "
# Stages of a step in which the peak of a planned phase is reached.
_STAGES_OF = {
    "rollout": ("rollout",),
    "score": ("forward", "score"),
    "train": ("train",),
    "sync": ("weight_sync",),
}


def memory_peaks(
    planned: Mapping[str, object], steps: Iterable[Mapping[str, object]]
) -> dict[str, dict[str, float]]:
    """Bytes at the peak of each phase on the fullest rank: planned, and measured where a step was.

    On a GPU the measured ones are `torch.cuda.max_memory_allocated`, on a CPU what the process
    holds at the end of the phase.

    Args:
        planned: Bytes by phase, of `run.json`.
        steps: Metrics of each step.
    """
    peaks = {name: {"planned_bytes": float(str(value))} for name, value in planned.items()}
    for step in steps:
        for phase, stages in _STAGES_OF.items():
            found = [step.get(f"memory/{stage}_gb") for stage in stages]
            most = max((each for each in found if isinstance(each, int | float)), default=0.0)
            if most:
                peak = peaks.setdefault(phase, {})
                peak["measured_bytes"] = max(peak.get("measured_bytes", 0.0), most * 2**30)
    return peaks


def planned_phase(stage: str) -> str:
    """The planned phase that a stage of a step, or a phase within it, belongs to; "" of others."""
    return next((name for name, stages in _STAGES_OF.items() if stage in stages), "")


def _read_table() -> dict[str, MetricRow]:
    rows = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
    return {name: MetricRow(name, **row) for name, row in rows.items()}


METRICS = _read_table()


def metric_row(name: str) -> MetricRow | None:
    """The row of a metric: its own, that of its group, or of a step's; None if it is not known."""
    group = f"{name.split('/')[0]}/*" if "/" in name else name
    found = METRICS.get(name, METRICS.get(group))
    held_out = name.removeprefix("eval/")
    if found is None and held_out != name:
        row = metric_row(held_out)
        # Bounds are those of steps.
        found = row and replace(row, name=name, low=None, high=None)
    return found


def larger_is_better(metric: str) -> bool:
    """Whether larger values of a metric of evaluations are better, as those of unknown ones are.

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
