"""Lines of a journal: an event as JSON, ending in a checksum of everything up to it."""

from __future__ import annotations

import json
import zlib

from lightrft.config.files import finite_float, refuse_constant

FORMAT = 2
Event = dict[str, object]
_MARK = b', "check": "'


def event_line(event: Event, before: int) -> tuple[bytes, int]:
    """Return the line of an event, and its checksum.

    Args:
        event: JSON without `check`.
        before: Checksum of the previous line, 0 for the first one.
    """
    text = json.dumps(event, ensure_ascii=False)[:-1].encode()
    check = zlib.crc32(text, before)
    return text + _MARK + b'%08x"}\n' % check, check


def read_event(line: bytes, before: int) -> tuple[Event, int]:
    """Parse a line without its newline; return its event and checksum.

    Raises:
        ValueError, OverflowError, RecursionError: It is damaged, or an earlier line is lost or
            moved.
    """
    text, _, end = line.rpartition(_MARK)
    check = zlib.crc32(text, before)
    if end != b'%08x"}' % check:
        raise ValueError("its checksum is another")
    event = json.loads(text + b"}", parse_constant=refuse_constant, parse_float=finite_float)
    if type(event) is not dict or "event" not in event:
        raise ValueError("it is no event")
    return event, check


def read_count(event: Event, name: str) -> int:
    """Return a number, id or place of an event; a ValueError for anything else."""
    value = event.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise _wrong(event, name)
    return value


def read_ids(event: Event, name: str, *, below: int = 2**31) -> tuple[int, ...]:
    """Return the ids in a list of an event; a ValueError for anything else."""
    values = event.get(name)
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value < below for value in values
    ):
        raise _wrong(event, name)
    return tuple(values)


def read_text(event: Event, name: str, *choices: str) -> str:
    """Return a text of an event, one of the choices if there are any; else a ValueError."""
    value = event.get(name)
    if not isinstance(value, str) or (choices and value not in choices):
        raise _wrong(event, name)
    return value


def _wrong(event: Event, name: str) -> ValueError:
    return ValueError(f"{name} is {repr(event.get(name))[:60]}")
