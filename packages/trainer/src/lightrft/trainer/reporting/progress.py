"""How a run is followed: a live block on a terminal, else lines, and a sign of life between."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lightrft.strategy.distributed.deadlines import current_phase
from lightrft.trainer.reporting.loggers import CONSOLE_METRICS, ConsoleLogger, MetricsLogger

if TYPE_CHECKING:
    from rich.table import Table

LOG_FOLDER = "logs"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def is_terminal(stream: TextIO) -> bool:
    """Whether a block that redraws itself is welcome: on a terminal of a person."""
    return stream.isatty() and "CI" not in os.environ and os.environ.get("TERM") != "dumb"


def build_console(
    write: Callable[[str], None], *, num_steps: int, every: int, heartbeat_seconds: float
) -> MetricsLogger:
    """The console of the first rank.

    Args:
        write: Prints one line.
        num_steps: Steps of the run.
        every: Steps between two lines.
        heartbeat_seconds: Silence after which the phase under way is named.
    """
    if is_terminal(sys.stdout):
        return LiveBlock(num_steps)
    return Heartbeat(ConsoleLogger(write, every=every), write, seconds=heartbeat_seconds)


class Heartbeat:
    """Lines of metrics, and one more whenever none came for a while.

    Args:
        inner: Writes the lines of the steps.
        write: Prints one line.
        seconds: Silence that is too long.
    """

    def __init__(
        self, inner: MetricsLogger, write: Callable[[str], None], *, seconds: float
    ) -> None:
        self._inner, self._write, self._seconds = inner, write, seconds
        self._step = 0
        self._stop, self._spoke = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of a step."""
        self._step = step
        self._spoke.set()
        self._inner.log(step, metrics)

    def close(self) -> None:
        """Ends the signs of life."""
        self._stop.set()
        self._spoke.set()
        self._thread.join()
        self._inner.close()

    def _watch(self) -> None:
        while not self._stop.is_set():
            if self._spoke.wait(self._seconds):
                self._spoke.clear()
                continue
            self._write(f"heartbeat {phase_text(self._step)}")


def phase_text(step: int) -> str:
    """What is under way after `step`, as key=value pairs."""
    phase = current_phase()
    if phase is None:
        return f"after_step={step} phase=none"
    name, seconds = phase
    return f"after_step={step} phase={name.replace(' ', '_')} phase_seconds={seconds:.0f}"


class LiveBlock:
    """A block at the end of the terminal that shows step, phase, times and the last metrics."""

    def __init__(self, num_steps: int) -> None:
        from rich.live import Live

        self._num_steps, self._step, self._first = num_steps, 0, 0
        self._metrics: dict[str, float] = {}
        self._started = time.monotonic()
        self._live = Live(get_renderable=self._render, refresh_per_second=2)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step."""
        if step > 0 and self._step == 0:
            # The first step shown may not be the first: time per step counts from here.
            self._started = time.monotonic() - metrics.get("step_seconds", 0.0)
            self._first = step
        self._step = step
        self._metrics |= metrics

    def close(self) -> None:
        """Leaves the block as it is."""
        self._live.stop()

    def _render(self) -> Table:
        from rich.table import Table

        phase = current_phase()
        name, seconds = phase if phase is not None else ("between phases", 0.0)
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{self._step} of {self._num_steps}{self._remaining()}")
        table.add_row("phase", f"{name} {seconds:.0f} s")
        evaluated = sorted(metric for metric in self._metrics if metric.startswith("eval/"))
        for metric in (*CONSOLE_METRICS, *evaluated):
            if metric in self._metrics:
                table.add_row(metric, f"{self._metrics[metric]:.4g}")
        return table

    def _remaining(self) -> str:
        if self._step == 0:
            return ""
        per_step = (time.monotonic() - self._started) / (self._step - self._first + 1)
        minutes, seconds = divmod(int(per_step * (self._num_steps - self._step)), 60)
        return f", about {minutes}:{seconds:02} left"


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Writes what the modules log, warnings included, to `logs/rank_N.log` of the run.

    Of the first rank warnings are shown on standard error as well.
    """
    path = folder / LOG_FOLDER / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(_LOG_FORMAT))
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING if rank == 0 else logging.CRITICAL)
    own, warnings = logging.getLogger("lightrft"), logging.getLogger("py.warnings")
    level = own.level
    own.setLevel(logging.DEBUG)
    for logger, handler in ((own, file), (own, shown), (warnings, file)):
        logger.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException as error:
        where = (own.name, logging.INFO, __file__, 0, "the run ended here", ())
        file.handle(own.makeRecord(*where, (type(error), error, error.__traceback__)))
        raise
    finally:
        logging.captureWarnings(False)
        own.setLevel(level)
        for logger, handler in ((own, file), (own, shown), (warnings, file)):
            logger.removeHandler(handler)
        file.close()
