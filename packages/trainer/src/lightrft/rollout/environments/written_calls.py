"""Formats of calls with JSON, read off a turn that a chat template wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
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
_BETWEEN = re.compile(r"\s*[,;]?\s*(?=\{)")


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

    def read(self, item: object) -> ToolCall:
        """Return the call that an object is.

        Raises:
            MalformedCallError: It is none.
        """
        outer = item if isinstance(item, dict) else {}
        parts = outer.get(self.inside, outer)
        parts = parts if isinstance(parts, dict) else {}
        name, arguments = parts.get(self.name), parts.get(self.arguments, {})
        if not self.name and len(parts) == 1:
            ((name, arguments),) = parts.items()
        if not isinstance(name, str) or not isinstance(arguments, dict):
            keys = f"{self.name!r} and {self.arguments!r}" if self.name else "one name"
            raise MalformedCallError(f"a call is an object with {keys}, whose arguments are one")
        call_id = {**outer, **parts}.get(self.call_id)
        return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")

    def body(self, text: str, place: int) -> tuple[list[ToolCall], int]:
        """Read a list of objects, or objects one after another."""
        calls = list[ToolCall]()
        while True:
            value, place = decode_json(text, place)
            calls += [self.read(item) for item in (value if isinstance(value, list) else [value])]
            further = _BETWEEN.match(text, place)
            if further is None:
                return calls, place
            place = further.end()


def parser_of_turn(turn: str, call: ToolCall) -> CallParser | None:
    """Return a parser of the format in which a turn has a call; None without JSON in it.

    Args:
        turn: Turn with the call, as the chat template writes it.
        call: The call.
    """
    for start, value, end in _values(turn):
        item = value[0] if isinstance(value, list) and value else value
        if keys := CallKeys.of(item, call):
            return _between(turn[:start], keys.body, turn[end:], cast("Arguments", item))
        place = turn.rfind(call.name, 0, start)
        if value == call.arguments and place >= 0:
            marks = _OPENING.search(turn[:place])
            head, rest = marks["head"] if marks else "", turn[place + len(call.name) : start]
            texts = (re.escape(part.strip()) for part in (head, rest))
            pattern = r"\s*{}\s*(?P<name>[\w.-]+)\s*{}\s*".format(*texts)
            body = named_json(pattern.replace(call.call_id, r"(?P<id>[\w.:-]+)"))
            return _between(turn[: place - len(head)], body, turn[end:])
    return None


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


def _between(before: str, body: Body, after: str, keys: Iterable[str] = ()) -> CallParser | None:
    """Return a parser of calls between the marks that stand before and after one.

    Args:
        before, after: Texts around the call.
        body: Parser of the call.
        keys: Keys of an object that is a call, even if no mark stands before it.
    """
    marks, closing = _OPENING.search(before), _CLOSING.search(after)
    if opening := before[marks.start("last") if marks else 0 :].strip():
        first = (marks and marks["first"]) or opening
        return Marked(opening, closing[0] if closing else after.strip(), body, begins=(first,))
    names = "|".join(re.escape(json.dumps(key)) for key in keys)
    begin = re.compile(rf"[\[\s]*{{\s*(?:{names})\s*:")

    def bare(text: str, is_ended: bool, before: str = "", /) -> list[ToolCall]:
        """Parse a turn that is a call alone; other JSON is an answer."""
        del is_ended
        said = spoken(text, before)
        return body(said, 0)[0] if names and begin.match(said) else []

    return bare
