"""Where the lines of this process go: on standard output, or where a run wants them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TypeVar

T = TypeVar("T")
# Takes a line, and whether it is news of the engine room: what was slept, woken, hashed.
Outlet = Callable[[str, bool], None]
_outlets: list[Outlet] = []
_counted: list[tuple[str, int, int]] = []


@contextmanager
def lines_to(outlet: Outlet) -> Iterator[None]:
    """Hands every line to `outlet` while the body runs; the innermost counts."""
    _outlets.append(outlet)
    try:
        yield
    finally:
        _outlets.remove(outlet)


def write_line(text: str, *, is_detail: bool = False, is_stamped: bool = True) -> None:
    """Writes a line; on standard output it begins with the time if `is_stamped`."""
    if _outlets:
        _outlets[-1](text, is_detail)
        return
    stamp = f"[StrategyINFO {datetime.now():%m-%d %H:%M:%S}]  " if is_stamped else ""
    sys.stdout.write(f"{stamp}{text}\n")
    sys.stdout.flush()


def counted(items: Sequence[T], name: str) -> Iterator[T]:
    """The items one after another; meanwhile `current_count` tells how many are done."""
    for done, item in enumerate(items):
        report_count(name, done, len(items))
        yield item
    report_count(name, 0, 0)


def report_count(name: str, done: int, total: int) -> None:
    """Says how far a long piece of work is; a `total` of 0 ends it."""
    _counted[:] = [(name, done, total)] if total else []


def current_count() -> tuple[str, int, int] | None:
    """Name, done and total of the work that is counted at the moment, or None."""
    found = _counted[-1:]
    return found[0] if found else None
