"""Lines of a journal: an event as JSON, ending in a checksum of everything up to it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import get_args

from lightrft.engines.types import FinishReason, LogprobsMode

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
        ValueError, TypeError, OverflowError, RecursionError: It is damaged, or an earlier line is
            lost or moved.
    """
    text, _, end = line.rpartition(_MARK)
    check = zlib.crc32(text, before)
    if end != b'%08x"}' % check:
        raise ValueError("its checksum is another")
    event = json.loads(text + b"}")
    if type(event) is not dict or event.get("event") not in _FIELDS:
        raise ValueError("it is no event")
    _check_fields(event, _FIELDS[event["event"]])
    return event, check


def _check_fields(event: Mapping[str, object], fields: Mapping[str, _Claim]) -> None:
    for name, is_right in fields.items():
        if not is_right(event.get(name)):
            raise ValueError(f"{name} is {repr(event.get(name))[:60]}")


_Claim = Callable[[object], bool]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _list_of(is_item: _Claim) -> _Claim:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


def _one_of(*choices: object) -> _Claim:
    return lambda value: type(value) in map(type, choices) and value in choices


def _object_of(fields: Mapping[str, _Claim]) -> _Claim:
    def is_right(value: object) -> bool:
        if isinstance(value, dict):
            _check_fields(value, fields)
        return isinstance(value, dict)

    return is_right


def _is_span(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_id, value))


_ENVIRONMENT = {"schemas": _list_of(_object_of({})), "answers_turns": _one_of(True, False)}
_CALL: Mapping[str, _Claim] = {
    "name": _is_text,
    "arguments": _object_of({}),
    "outcome": _one_of("ok", "error", "malformed", "refused"),
    "text": _is_text,
    "seconds": _is_number,
    "ends_episode": _one_of(True, False),
}
_TURN: Mapping[str, _Claim] = {"sample_id": _is_count, "turn": _is_count}
# Fields that are read of each event.
_FIELDS: Mapping[str, Mapping[str, _Claim]] = {
    "begin": {
        "format": _one_of(FORMAT),
        "weights": lambda value: type(value) is int,
        "environment": _object_of(_ENVIRONMENT),
    },
    "reset": {
        "sample_id": _is_count,
        "told": lambda value: value is None or isinstance(value, str),
        "prompt_token_ids": _list_of(_is_id),
    },
    "turn": {
        **_TURN,
        "request_id": _is_count,
        "context_hash": _is_text,
        "token_ids": lambda value: bool(value) and _list_of(_is_id)(value),
        "logprobs": _list_of(_is_number),
        "logprobs_mode": _one_of(*get_args(LogprobsMode)),
        "finish_reason": _one_of(*get_args(FinishReason)),
    },
    "round": {"sample_ids": _list_of(_is_count)},
    "answer": {**_TURN, "call": _object_of(_CALL)},
    "observation": {**_TURN, "token_ids": _list_of(_is_id), "text_spans": _list_of(_is_span)},
    "failed": {**_TURN, "failure": _is_text},
    "again": {"sample_id": _is_count},
    "end": {"sample_id": _is_count},
}
