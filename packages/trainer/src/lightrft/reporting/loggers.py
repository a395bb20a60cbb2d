"""Receivers of the metrics and the times of a step."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import Protocol, TextIO

from lightrft.config.files import make_folder, named_errors
from lightrft.reporting.files import LOG_FOLDER
from lightrft.strategy.distributed.deadlines import span_sink

# Shown on the console line, in this order, where present.
CONSOLE_METRICS = (
    "reward",
    "policy_loss",
    "critic_loss",
    "kl",
    "entropy",
    "response_length",
    "grad_norm",
    "actor_lr",
    "logprob_diff_max",
    "step_seconds",
)

# Metrics of the curve in a notebook.
SHOWN = ("reward", "loss", "eval/reward")
WIDTH, HEIGHT, MARGIN = 560, 160, 8
COLOURS = ("#4477aa", "#ee6677", "#228833")


class JsonLinesFile:
    """A file of JSON objects, one a line, opened at the first line and flushed after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, entry: Mapping[str, object]) -> None:
        """Write one line, so that a killed run keeps it."""
        make_folder(self._path.parent)
        with named_errors(self._path):
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLinesLogger(JsonLinesFile):
    """Log of one JSON object a step: {"step": 3, "policy_loss": ...}.

    Numbers that JSON does not have (NaN, infinity) become null.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append({"step": step, **values})


class MetricsLogger(Protocol):
    """A receiver of metrics. Only the first rank has loggers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; names with a slash belong to a group."""
        ...

    def close(self) -> None:
        """Write what is pending."""
        ...


class ConsoleLogger:
    """Logger of one line of key=value pairs a step.

    Args:
        write: Callback that prints one line.
        every: Steps between two lines; lines with evaluation results are always shown.
    """

    def __init__(self, write: Callable[[str], None], *, every: int = 1) -> None:
        self._write = write
        self._every = every

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        shown = [name for name in CONSOLE_METRICS if name in metrics]
        evaluated = sorted(name for name in metrics if name.startswith("eval/"))
        if evaluated or step % self._every == 0:
            parts = [f"{name}={metrics[name]:.4g}" for name in (*shown, *evaluated)]
            self._write(" ".join([f"step={step}", *parts]))

    def close(self) -> None:
        """Do nothing: nothing is pending."""


class LoggerGroup:
    """Several loggers as one; none on all ranks but the first."""

    def __init__(self, loggers: Sequence[MetricsLogger] = ()) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics to every logger."""
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        """Close every logger."""
        for logger in self._loggers:
            logger.close()


class NotebookCurve:
    """Curves of a few metrics over the steps, redrawn after each step.

    Args:
        show: Callback that puts HTML in place of what it showed before.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._points: dict[str, list[tuple[int, float]]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the values of a step."""
        for name in SHOWN:
            if name in metrics and math.isfinite(metrics[name]):
                self._points.setdefault(name, []).append((step, metrics[name]))
        self._show("".join(curve(name, points) for name, points in self._points.items()))

    def close(self) -> None:
        """Do nothing: nothing is pending."""


def curve(name: str, points: list[tuple[int, float]]) -> str:
    """Return a metric as a figure with its first and last value.

    Args:
        name: Name of the metric.
        points: (step, value) of each step, one at least.
    """
    steps, values = zip(*points, strict=True)
    spans = max(steps) - min(steps) or 1, max(values) - min(values) or 1.0
    width, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = " ".join(
        f"{MARGIN + width * (step - min(steps)) / spans[0]:.1f},"
        f"{MARGIN + height * (max(values) - value) / spans[1]:.1f}"
        for step, value in points
    )
    colour = COLOURS[SHOWN.index(name) % len(COLOURS)]
    text = f"{name}: {values[0]:.4g} in step {steps[0]}, {values[-1]:.4g} in step {steps[-1]}"
    return (
        f'<figure><figcaption>{escape(text)}</figcaption><svg width="{WIDTH}" height="{HEIGHT}">'
        f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
        f'<circle cx="{places.split()[-1].split(",")[0]}" '
        f'cy="{places.split()[-1].split(",")[1]}" r="3" fill="{colour}"/></svg></figure>'
    )


def notebook_loggers() -> list[NotebookCurve]:
    """Return one curve where this process is the kernel of a notebook, else none."""
    if "ipykernel" not in sys.modules:
        return []
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    # The package may be imported without a kernel, which shows nothing.
    return [] if handle is None else [NotebookCurve(lambda text: handle.update(HTML(text)))]


def is_kept(step: int) -> bool:
    """Return whether a step's times are written: the first 99, then 90 of each power of ten.

    Step 0 is not: evaluations have it.
    """
    return step > 0 and step % int(10 ** max(0, len(str(step)) - 2)) == 0


@contextmanager
def rank_timeline(folder: Path, rank: int) -> Iterator[None]:
    """Write this rank's stages into `logs/timeline_N.jsonl` of the run, as Chrome's trace events.

    What cannot be written, say to a full disk, is left out: a run does not end for it.
    """
    file = JsonLinesFile(folder / LOG_FOLDER / f"timeline_{rank}.jsonl")

    def write(step: int, stage: str, start: float, end: float) -> None:
        if not is_kept(step):
            return
        microseconds = {"ts": round(1e6 * start), "dur": round(1e6 * (end - start))}
        event = {"name": stage, "ph": "X", "pid": rank, "tid": 0, **microseconds}
        with suppress(OSError):
            file.append({**event, "args": {"step": step}})

    try:
        with span_sink(write):
            yield
    finally:
        with suppress(OSError):
            file.close()
