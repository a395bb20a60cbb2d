"""The console of a run: a line a step, on a terminal a bar below, and details on request."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from lightrft.reporting.loggers import ConsoleLogger
from lightrft.reporting.start_bar import end_start_bar, is_terminal
from lightrft.strategy.distributed.context import current_progress
from lightrft.strategy.distributed.deadlines import current_phase

if TYPE_CHECKING:
    from rich.text import Text

logger = logging.getLogger(__name__)
BAR_WIDTH = 20
NAME_WIDTH = 20
# A shorter phase would make the bar flicker.
LONG_PHASE_SECONDS = 0.5
# Columns of every number of a step's line, so that each stands below the one before.
NUMBER_WIDTH = 5
# Metric, label, most decimals and unit of each field of a step's line.
FIELDS = (
    ("reward", "reward ", 3, ""),
    ("eval/reward", "held-out ", 3, ""),
    ("response_length", "len ", 1, ""),
    ("tokens_per_second", "", 0, " tok/s"),
)
# Fields of a step without rewards, which is measured by its teacher.
TEACHER_FIELDS = (("teacher_kl", "teacher KL ", 3, ""), *FIELDS[2:])
LOSS_FIELDS = (
    ("loss", "loss ", 3, ""),
    ("eval/loss", "held-out ", 3, ""),
    ("train_tokens_per_second", "", 0, " tok/s"),
)
# Fields of a stage that compares answers.
PAIR_FIELDS = (
    LOSS_FIELDS[0],
    ("accuracy", "right ", 3, ""),
    ("margin", "margin ", 3, ""),
    LOSS_FIELDS[1],
    ("eval/accuracy", "right ", 3, ""),
    LOSS_FIELDS[2],
)
# Start of the following lines of a broken line.
INDENT = "    "


def step_line(
    step: int,
    num_steps: int,
    metrics: Mapping[str, float],
    *,
    seconds_left: float | None = None,
    width: int | None = None,
) -> str:
    """Return one line about a step, in the same columns as those of other steps.

    Args:
        step, num_steps: Steps done, and steps of the whole run.
        metrics: Metrics of the step.
        seconds_left: Seconds left of the whole run, or None.
        width: Columns of the terminal; fields are left out until the line fits, the speed first.
    """
    digits = len(str(num_steps))
    fields = [f"step {step:>{digits}}/{num_steps}"]
    has_teacher_alone = "teacher_kl" in metrics and "reward" not in metrics
    shown: tuple[tuple[str, str, int, str], ...] = TEACHER_FIELDS if has_teacher_alone else FIELDS
    if "loss" in metrics or "eval/loss" in metrics:  # of a stage without rewards
        compares = not {"accuracy", "eval/accuracy"}.isdisjoint(metrics)
        shown = PAIR_FIELDS if compares else LOSS_FIELDS
    for name, label, decimals, unit in shown:
        field = f"{label}{fitted(metrics.get(name, 0.0), decimals)}{unit}"
        fields.append(field if name in metrics else " " * len(field))
    if seconds_left is not None:
        fields.append(f"{duration(seconds_left):>6} left")
    while width is not None and len(fields) > 1 and len("  ".join(fields).rstrip()) > width:
        fields.pop(len(shown) if len(fields) > len(shown) else -1)
    return "  ".join(fields).rstrip()


def fitted(value: float, decimals: int) -> str:
    """Return a number in `NUMBER_WIDTH` columns, with as many decimals as fit."""
    for scaled, unit in ((value, ""), (value / 1e3, "k"), (value / 1e6, "M"), (value / 1e9, "G")):
        if unit and abs(scaled) >= 1000:
            continue
        for places in range(2 if unit else decimals, -1, -1):
            text = f"{scaled:.{places}f}{unit}".replace("-0.", "-.")
            if len(text) <= NUMBER_WIDTH:
                return text.rjust(NUMBER_WIDTH)
    return f"{value:.0e}".replace("e+", "e").rjust(NUMBER_WIDTH)


def duration(seconds: float) -> str:
    """Format a duration in the two largest units: 1:05 (minutes, seconds), 2h05m, 3d04h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}:{rest:02}"


class RunConsole:
    """The console of the first rank: a logger of metrics, and a sink of lines.

    Args:
        every: Steps between two lines; lines with evaluation results are always shown.
        heartbeat_seconds: Silence after which the current phase is named, where there is no bar.
        is_verbose: Whether to show details, and all metrics of the console, too.
    """

    def __init__(
        self, *, heartbeat_seconds: float, every: int = 1, is_verbose: bool = False
    ) -> None:
        self._every, self._is_verbose = every, is_verbose
        self._step, self._num_steps = 0, 0
        self._first_step: int | None = None
        self._started = 0.0
        end_start_bar()
        self._stream = sys.stdout
        self._screen: TerminalScreen | PlainScreen = (
            TerminalScreen(self._stream, self._title)
            if is_terminal(self._stream)
            else PlainScreen(self._stream, self._title, seconds=heartbeat_seconds)
        )

    def plan(self, num_steps: int, *, after: int = 0) -> None:
        """Take the number of steps of the run, and how many were completed before."""
        self._num_steps, self._step = num_steps, after

    def tell(self, text: str, is_detail: bool) -> None:
        """Log a line, and show it unless it is a detail; if verbose, show details, too."""
        logger.info("%s", text)
        if self._is_verbose or not is_detail:
            self._screen.line(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the line of a step."""
        now = time.monotonic()
        if step > 0 and self._first_step is None:
            # The first step shown may not be the first of the run: its duration counts.
            self._first_step, self._started = step, now - metrics.get("step_seconds", 0.0)
        self._step = step
        if "eval/reward" in metrics or "eval/loss" in metrics or step % self._every == 0:
            is_live = isinstance(self._screen, TerminalScreen)
            width = shutil.get_terminal_size().columns if is_live else None
            self._screen.line(
                step_line(
                    step,
                    self._num_steps,
                    metrics,
                    seconds_left=self._seconds_left(now),
                    width=width,
                )
            )
        if self._is_verbose:
            ConsoleLogger(self._screen.line, every=self._every).log(step, metrics)

    def close(self) -> None:
        """End the bar and the signs of life; lines are still shown."""
        self._screen.close()

    def _seconds_left(self, now: float) -> float | None:
        if self._first_step is None:
            return None
        per_step = (now - self._started) / (self._step - self._first_step + 1)
        return per_step * max(0, self._num_steps - self._step)

    def _title(self) -> str:
        """Return the title of the bar: the current step, or what comes before the first."""
        if not self._num_steps:
            return "start"
        return f"step {min(self._step + 1, self._num_steps)}/{self._num_steps}"


class PlainScreen:
    """Lines in a stream, and one more whenever none came for a while.

    Args:
        stream: Output stream.
        title: Callback that returns the current step.
        seconds: Longest silence.
    """

    def __init__(self, stream: TextIO, title: Callable[[], str], *, seconds: float) -> None:
        self._stream, self._title, self._seconds = stream, title, seconds
        self._stop, self._spoke = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        """Write a line."""
        self._spoke.set()
        self._write(text)

    def close(self) -> None:
        """End the signs of life."""
        self._stop.set()
        self._spoke.set()
        self._thread.join()

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _watch(self) -> None:
        while not self._stop.is_set():
            if self._spoke.wait(self._seconds):
                self._spoke.clear()
                continue
            self._write(f"still at {self._title()}{work_text(current_progress(), current_phase())}")


def work_text(count: tuple[str, int, int] | None, phase: tuple[str, float] | None) -> str:
    """Return a sentence's end about the current work: its name, its progress, its seconds."""
    parts = [] if count is None else [f"{count[0]} {count[1]} of {count[2]}"]
    if phase is not None:
        parts = [phase[0], *parts, f"{phase[1]:.0f} s"]
    return f": {', '.join(parts)}" if parts else ""


class TerminalScreen:
    """Lines above a bar, which shows the current work and its progress.

    Args:
        stream: Terminal.
        title: Callback that returns the first words of the bar.
    """

    def __init__(self, stream: TextIO, title: Callable[[], str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=4,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._led: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        past = terminal_handlers()
        self._live.start()
        for handler in past:
            # Libraries keep the stream of their import, and would write past the one with the bar.
            self._led.append((handler, handler.stream))
            handler.setStream(sys.stdout)

    def line(self, text: str) -> None:
        """Write a line above the bar; one longer than the terminal is broken between words."""
        width = self._console.width
        for part in text.split("\n"):
            whole = textwrap.fill(
                part,
                width,
                subsequent_indent=INDENT,
                replace_whitespace=False,
                break_long_words=False,
                break_on_hyphens=False,
            )
            # The terminal breaks a path that is too long, so that it is copied in one piece.
            self._console.print(whole, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._live.stop()
        while self._led:
            handler, stream = self._led.pop()
            handler.setStream(stream)

    def _render(self) -> Text:
        from rich.text import Text

        text = bar_text(self._title(), current_progress(), current_phase())
        return Text(text[: self._console.width], no_wrap=True)


def terminal_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Return handlers of all loggers that write to the terminal, or did so past an earlier bar."""
    from rich.file_proxy import FileProxy

    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    standard = [s for s in streams if s is not None and not s.closed and s.isatty()]
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        # A handler without a stream attribute looks up the standard one each time.
        if isinstance(handler, logging.StreamHandler)
        and "stream" in vars(handler)
        and (
            isinstance(handler.stream, FileProxy)
            or any(handler.stream is stream for stream in standard)
        )
    ]


@contextmanager
def bar_below(title: str) -> Iterator[None]:
    """Show, on a terminal, a bar below what is printed while the body runs."""
    end_start_bar()
    if not is_terminal(sys.stdout):
        yield
        return
    screen = TerminalScreen(sys.stdout, lambda: title)
    try:
        yield
    finally:
        screen.close()


def bar_text(
    title: str, count: tuple[str, int, int] | None, phase: tuple[str, float] | None
) -> str:
    """Return the current work: a bar where it is counted, else its seconds; empty if it is short.

    Args:
        title: First words.
        count: Name, done and total.
        phase: Name and seconds.
    """
    if count is not None:
        name, done, total = count
        bar = f"{'#' * (BAR_WIDTH * done // total):-<{BAR_WIDTH}}"
        return f"{title}  {name:{NAME_WIDTH}.{NAME_WIDTH}}  {bar}  {done}/{total}"
    if phase is not None and phase[1] >= LONG_PHASE_SECONDS:
        return f"{title}  {phase[0]:{NAME_WIDTH}.{NAME_WIDTH}}  {duration(phase[1])}"
    return ""
