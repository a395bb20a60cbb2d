"""What happened to a run, in sentences for its report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.trainer.runs.files import EVENTS_FILE, JsonLines

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {
    "started": "started",
    "resumed": "continued after step {step}",
    "stopped": "stopped by a signal after step {step}, with a checkpoint",
    "finished": "finished after step {step}",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run.

    Args:
        name: As in events.jsonl.
        when: Time in UTC; "" if it is not recorded.
        sentence: What happened, and what was changed by the command that continued the run.
    """

    name: str
    when: str
    sentence: str


def read_events(folder: Path) -> list[Event]:
    """The events of a run, oldest first; lines that cannot be read are left out."""
    return [_event(step, entry) for step, entry in JsonLines(folder / EVENTS_FILE)]


def _event(step: int, entry: Mapping[str, object]) -> Event:
    name = str(entry.get("event"))
    sentence = WORDS.get(name, name).format(step=step) if name in WORDS else f"{name}, step {step}"
    world_size = entry.get("world_size")
    if isinstance(world_size, int):
        sentence += f", {world_size} process{'' if world_size == 1 else 'es'}"
    changes = entry.get("changes")
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, Mapping):
            exact = "" if change.get("is_free") is True else ", no longer exact"
            sentence += (
                f"; {change.get('name')}: {change.get('before')} → {change.get('after')}{exact}"
            )
    return Event(name, _when(entry.get("unix_seconds")), sentence)


def _when(seconds: object) -> str:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # no date
        return ""
