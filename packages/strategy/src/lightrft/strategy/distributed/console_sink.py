"""Sink of a process' lines: standard output, or a run's replacement; progress of work."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
# Function of a line and whether it is a detail: memory, sleep, weight sync.
ConsoleSink = Callable[[str, bool], None]
_sinks: list[ConsoleSink] = []
_progress: list[tuple[str, int, int]] = []


@contextmanager
def console_sink(sink: ConsoleSink) -> Iterator[None]:
    """Pass every line to `sink` while the body runs; the innermost counts.

    Work that was in progress at the end has failed: the next run does not show it.
    """
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)
        _progress.clear()


def write_line(text: str, *, is_detail: bool = False, is_stamped: bool = True) -> None:
    """Write a line; on standard output it begins with the time if `is_stamped`.

    Without a sink, a detail goes to the log alone.
    """
    if _sinks:
        _sinks[-1](text, is_detail)
        return
    if is_detail:
        logger.info("%s", text)
        return
    stamp = f"[StrategyINFO {datetime.now():%m-%d %H:%M:%S}]  " if is_stamped else ""
    sys.stdout.write(f"{stamp}{text}\n")
    sys.stdout.flush()


def with_progress(items: Sequence[T], name: str) -> Iterator[T]:
    """Yield the items; meanwhile `current_progress` reports how many are done."""
    for done, item in enumerate(items):
        report_progress(name, done, len(items))
        yield item
    _progress.clear()


def report_progress(name: str, done: int, total: int) -> None:
    """Record the progress of a long piece of work; a `total` of 0 ends it."""
    _progress[:] = [(name, done, total)] if total else []


def current_progress() -> tuple[str, int, int] | None:
    """Return name, done and total of the work in progress, or None."""
    return _progress[-1] if _progress else None
