"""Formats of calls with JSON, read off a turn that a chat template wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from lightrft.rollout.environments.call_formats import (
    Arguments,
    Body,
    CallParser,
    MalformedCallError,
    Marked,
    ToolCall,
    decode_json,
    named_json,
    spoken,
)

# Such as <tool_call> and [TOOL_CALLS].
_MARK = r"(?:<[^<>\s]+>|\[/?[A-Z_]+\])"
_OPENING = re.compile(rf"(?P<first>{_MARK})?(?:\s*{_MARK})*\s*(?P<last>{_MARK})(?P<head>[^<>]*)\Z")
_CLOSING = re.compile(rf"{_MARK}|```")
_BRACKET = re.compile(r"[\[{]")
_BETWEEN = re.compile(r"\s*+(?:[,;]\s*+)?(?=\{)")


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Keys of a JSON object that is a call.

    Args:
        name: Key of the tool's name; "" if the arguments stand under that name.
        arguments, call_id: Keys of the arguments, and of the call's id; "" without one.
        inside: Key of the object with both, beside the id; "" if there is none.
    """

    name: str = ""
    arguments: str = ""
    call_id: str = ""
    inside: str = ""

    @classmethod
    def of(cls, item: object, call: ToolCall) -> CallKeys | None:
        """Return the keys under which an object has a call; None if it is not that call."""
        if not isinstance(item, dict):
            return None
        if item == {call.name: call.arguments}:
            return cls()

        def key_of(part: object, value: dict[str, object]) -> str:
            return next((key for key, each in value.items() if each == part), "")

        for inside in ("", *item):
            value = item.get(inside, item)
            if isinstance(value, dict) and key_of(call.name, value):
                keys = key_of(call.name, value), key_of(call.arguments, value)
                return cls(*keys, key_of(call.call_id, {**item, **value}), inside)
        return None

    def parts(self, item: object) -> dict[str, object]:
        """Return the object with name and arguments in a call; {} if the item lacks one of them."""
        outer = item if isinstance(item, dict) else {}
        parts = outer.get(self.inside, outer)
        is_call = isinstance(parts, dict) and (
            len(parts) == 1 if not self.name else {self.name, self.arguments} <= parts.keys()
        )
        return parts if is_call else {}

    def read(self, item: object) -> ToolCall:
        """Return the call that an object is.

        Raises:
            MalformedCallError: It is none.
        """
        parts = self.parts(item)
        name, arguments = parts.get(self.name), parts.get(self.arguments)
        if parts and not self.name:
            ((name, arguments),) = parts.items()
        if not isinstance(name, str) or not isinstance(arguments, dict):
            keys = f"{self.name!r} and {self.arguments!r}" if self.name else "one name"
            raise MalformedCallError(f"a call is an object with {keys}, whose arguments are one")
        call_id = {**cast("Arguments", item), **parts}.get(self.call_id)
        return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")

    def body(self, text: str, place: int) -> tuple[list[ToolCall], int]:
        """Read a list of objects, or objects one after another."""
        items, place = _items(text, place)
        return [self.read(item) for item in items], place

    def found_in(self, text: str, place: int) -> tuple[list[ToolCall], int]:
        """Read the same where nothing but keys tells calls from other JSON, which is passed over.

        The place is behind the bracket that begins it.
        """
        items, place = _items(text, place - 1)
        return [self.read(item) for item in items if self.parts(item)], place


def parser_of_turn(turn: str, call: ToolCall) -> CallParser | None:
    """Return a parser of the format in which a turn has a call; None without JSON in it.

    Args:
        turn: Turn with the call, as the chat template writes it.
        call: The call.
    """
    for start, value, end in _values(turn):
        item = value[0] if isinstance(value, list) and value else value
        if keys := CallKeys.of(item, call):
            return _of_keys(keys, turn[:start], turn[start], turn[end:])
        place = turn.rfind(call.name, 0, start)
        if value == call.arguments and place >= 0:
            marks = _OPENING.search(turn[:place])
            head, rest = marks["head"] if marks else "", turn[place + len(call.name) : start]
            # Between two of these would stand spaces twice, which takes quadratic time.
            parts = (re.escape(head.strip()), r"(?P<name>[\w.-]+)", re.escape(rest.strip()))
            pattern = "".join(rf"\s*+{part}" for part in parts if part)
            body = named_json(pattern.replace(call.call_id, r"(?P<id>[\w.:-]+)"))
            opening = turn[: place - len(head)]
            return _between(opening, body, turn[end:]) if "<" in opening else None
    return None


def _items(text: str, place: int) -> tuple[list[object], int]:
    """Return the objects of a list, or objects one after another, and the place behind them."""
    items = list[object]()
    while True:
        value, place = decode_json(text, place)
        items += value if isinstance(value, list) else [value]
        further = _BETWEEN.match(text, place)
        if further is None:
            return items, place
        place = further.end()


def _values(text: str) -> Iterator[tuple[int, object, int]]:
    """Yield the JSON values of a text, each between its start and its end."""
    place = 0
    while bracket := _BRACKET.search(text, place):
        try:
            value, place = decode_json(text, bracket.start())
        except MalformedCallError:
            place = bracket.end()
        else:
            yield bracket.start(), value, place


def _of_keys(keys: CallKeys, before: str, bracket: str, after: str) -> CallParser:
    """Return a parser of objects with these keys.

    Args:
        keys: Keys of a call.
        before, after: Texts around calls.
        bracket: Bracket that begins them.
    """
    if _OPENING.search(before):
        return _between(before, keys.body, after)
    if before.strip():  # an ordinary text, which may stand before other JSON
        opening = before.lstrip() + bracket
        return Marked(opening, _closing(after), keys.found_in, begins=(opening,))

    def alone(text: str, is_ended: bool, before: str = "", /) -> list[ToolCall]:
        """Parse a turn that is calls alone; other JSON is an answer."""
        del is_ended
        said = spoken(text, before).strip()
        may_call = said.startswith(bracket) and json.dumps(keys.name) in said
        return keys.found_in(said, 1)[0] if may_call else []

    return alone


def _between(before: str, body: Body, after: str) -> CallParser:
    """Return a parser of calls between the marks that stand before and after one."""
    marks = _OPENING.search(before)
    opening = before[marks.start("last") if marks else 0 :].strip()
    first = (marks and marks["first"]) or opening
    return Marked(opening, _closing(after), body, begins=(first,))


def _closing(after: str) -> str:
    mark = _CLOSING.search(after)
    return mark[0] if mark else after.strip()
