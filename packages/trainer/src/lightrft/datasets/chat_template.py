"""Chat template that renders messages of rows, and tests which parts it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import cast

from lightrft.datasets.messages import (
    ASSISTANT,
    CALLS,
    REASONING,
    REASONING_KEYS,
    Message,
    with_objects,
)
from lightrft.datasets.types import DataError
from lightrft.engines.text import Tokenizer

# Nine letters and digits: Mistral's templates require such ids of calls.
_MARK, CALL_ID = "Qmark7Zab", "call00000"
QUESTION: Message = {"role": "user", "content": "question"}
# Keys of results that are always read; see `answering`.
_LINKS = {"role", "tool_call_id", "name"}
# Name for an assistant's message with calls: templates drop other parts of it.
_CALLER = "assistant with calls"
_REMEDY = "give a template that writes them (--chat_template FILE), or leave them out of the rows"


class RenderingError(DataError):
    """The chat template cannot render messages; the message says why."""


class ChatTemplate:
    """Chat template of a renderer.

    Args:
        renderer: Tokenizer that applies it.
    """

    def __init__(self, renderer: Tokenizer) -> None:
        self._renderer = renderer
        self._reads: dict[tuple[str, str], bool] = {}
        self._reasoning = REASONING
        self._ids: dict[str, bool] | None = None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, asks: bool = False
    ) -> str:
        """Return the text of messages.

        Args:
            messages: Messages in the form of `lightrft.datasets.messages`.
            tools: Schemas of the tools to show.
            asks: Whether to add the header of the assistant's next turn.

        Raises:
            RenderingError: The template refuses them.
        """

        def apply(shown: Sequence[Message]) -> str:
            text = self._renderer.apply_chat_template(
                list(shown), tools=list(tools) or None, tokenize=False, add_generation_prompt=asks
            )
            return cast("str", text)

        try:
            return self.apply(apply, messages)
        except Exception as err:  # a template is a program of the model's author
            reason = " ".join(str(err).split())[:200]
            raise RenderingError(f"the chat template refused the messages: {reason}") from err

    def apply(self, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
        """Return the text of messages in the form that the template takes; see `in_either_form`."""
        if self._reasoning != REASONING:
            messages = [
                {self._reasoning if key == REASONING else key: each[key] for key in each}
                for each in messages
            ]
        if any(CALLS in each for each in messages):
            messages = answering(messages, **self._rules_of_ids())
        return in_either_form(render, messages)

    def _rules_of_ids(self) -> dict[str, bool]:
        """Return whether it writes ids of calls, and whether names, as options of `answering`."""
        if self._ids is None:
            self._ids = {}  # while it is tried
            marked = (_MARK, "function"), (CALL_ID, _MARK)
            writes = (self._comes_out([QUESTION, caller(*each)], ()) for each in marked)
            self._ids = dict(zip(("writes_ids", "writes_names"), writes, strict=True))
        return self._ids

    def unread_keys(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[str]:
        """Return the keys of messages that the template ignores without a change of meaning.

        Each key is tested once, with a mark as its value.

        Raises:
            DataError: The template drops calls, thinking, tools, or the content of a role.
        """
        if tools and not self._is_read("", "tools", partial(self.shows_tools, messages, tools)):
            raise DataError(f"the chat template does not show tools: {_REMEDY}")
        unread = dict[str, None]()
        for place, message in enumerate(messages):
            for key in message.keys() - (_LINKS if message["role"] == "tool" else {"role"}):
                tries = partial(self._shows, messages, tools, place, key)
                if key == REASONING:
                    self._choose_reasoning(messages, tools, place)
                elif key == CALLS:
                    self._require_calls(message, tries)
                elif key == "content":
                    self._require_content(message, tries)
                elif not self._is_read(str(message["role"]), key, tries):
                    unread[key] = None
        return [*unread]

    def _require_calls(self, message: Message, tries: Callable[..., bool]) -> None:
        """Raise a DataError if the template drops calls of a message, or some of several."""
        what = "the calls of tools (tool_calls)"
        is_read = self._is_read(ASSISTANT, CALLS, tries)
        if is_read and len(cast("Sequence[Message]", message[CALLS])) > 1:
            what = "some of several calls in a message"
            is_read = self._is_read(_CALLER, CALLS, partial(tries, only_last=True))
        if not is_read:
            raise DataError(f"the chat template drops {what}: {_REMEDY}")

    def _require_content(self, message: Message, tries: Callable[[], bool]) -> None:
        """Raise a DataError if the template drops messages of a role, or the text before calls."""
        role = str(message["role"])
        what = f"messages of role {role}"
        if role == ASSISTANT and CALLS in message and message["content"]:
            role, what = _CALLER, "the text before calls, or writes it behind them"
        if role not in ("user", ASSISTANT) and not self._is_read(role, "content", tries):
            raise DataError(f"the chat template drops {what}: {_REMEDY}")

    def _is_read(self, role: str, key: str, tries: Callable[[], bool]) -> bool:
        if (role, key) not in self._reads:
            self._reads[role, key] = tries()
        return self._reads[role, key]

    def _choose_reasoning(
        self, messages: Sequence[Message], tools: Sequence[Message], place: int
    ) -> None:
        """Choose the name for thinking that the template reads; raise a DataError without one."""
        if self._reads.get((ASSISTANT, REASONING)):
            return
        for self._reasoning in REASONING_KEYS:
            if self._shows(messages, tools, place, REASONING):
                self._reads[ASSISTANT, REASONING] = True
                return
        self._reasoning = REASONING
        names = ", ".join(REASONING_KEYS)
        raise DataError(
            f"the chat template drops the thinking beside the content ({names}): {_REMEDY}"
        )

    def _shows(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        place: int,
        key: str,
        *,
        only_last: bool = False,
    ) -> bool:
        """Return whether a mark as the value of a message's key is rendered.

        Of several calls, the mark may be in the last alone.
        """
        message = messages[place]
        calls = cast("Sequence[Message]", message.get(CALLS) or ())
        value: object = _MARK
        if key == CALLS:
            marked = {"name": _MARK, "arguments": json.dumps({"value": _MARK})}
            kept = calls[:-1] if only_last else ()
            value = [
                *kept,
                *(
                    {**call, "function": {**_function(call), **marked}}
                    for call in calls[len(kept) :]
                ),
            ]
        # Many templates drop the thinking of earlier turns but write that of the last.
        rest = () if message["role"] == ASSISTANT else messages[place + 1 :]
        before = str(_function(calls[-1])["name"]) if calls and key == "content" else ""
        shown = [*messages[:place], {**message, key: value}, *rest]
        return self._comes_out(shown, tools, before=before)

    def shows_tools(self, messages: Sequence[Message], tools: Sequence[Message]) -> bool:
        """Return whether a further tool beside some would be rendered."""
        function = {"name": _MARK, "description": _MARK, "parameters": {"type": "object"}}
        more: Message = {"type": "function", "function": function}
        return self._comes_out(messages, [*tools, more])

    def _comes_out(
        self, messages: Sequence[Message], tools: Sequence[Message], *, before: str = ""
    ) -> bool:
        try:
            text = self.render(messages, tools)
        except RenderingError:
            return True  # rendering the row itself reports why it is refused
        return 0 <= text.rfind(_MARK) <= text.rfind(before)


@lru_cache(maxsize=16)
def _template_of(renderer: Tokenizer, template: str) -> ChatTemplate:
    del template  # it is only a key of the cache: another one renders differently
    return ChatTemplate(renderer)


def template_of(renderer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a renderer, with the results of its tests."""
    return _template_of(renderer, str(renderer.chat_template))  # type: ignore[arg-type]


def in_either_form(apply: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Render messages with call arguments as objects, or as JSON where that fails.

    A template that prints objects in Python's syntax gets JSON, too.

    Args:
        apply: Function that renders messages; may raise anything.
        messages: Messages with arguments as JSON.
    """
    objects = [with_objects(each) for each in messages]
    values = [
        _function(call)["arguments"]
        for each in objects
        for call in cast("Sequence[Message]", each.get(CALLS) or ())
    ]
    if not values:
        return apply(messages)
    try:
        text = apply(objects)
    except Exception as problem:  # noqa: BLE001 - a template is a program of its author
        try:
            return apply(messages)
        except Exception:  # noqa: BLE001 - the first error is of the form that most templates take
            raise problem from None
    if any(value and str(value) in text and json.dumps(value) != str(value) for value in values):
        return apply(messages)
    return text


# Id of a call in the row, its name, and its id as it is shown.
_Call = tuple[object, str, object]


def answering(
    messages: Sequence[Message], *, writes_ids: bool = False, writes_names: bool = True
) -> list[Message]:
    """Return messages in which calls have ids, and results the id and name of their call.

    A result without an id answers the next call, or the next one of its name.

    Args:
        messages: Messages in the form of `lightrft.datasets.messages`.
        writes_ids: Whether the template writes ids of calls: then none are invented.
        writes_names: Whether it writes names of calls; otherwise ids hold them, as Kimi-K2's do.
    """
    number, place, calls, items = 0, 0, list[_Call](), list[Message]()
    for message in messages:
        if message["role"] == "tool":
            items.append(_answer(message, calls, place))
            place += 1
            continue
        if place or CALLS not in message:
            place, calls = 0, []
        shown = list[Message]()
        for call in cast("Sequence[Message]", message.get(CALLS) or ()):
            call_id, name = call.get("id"), str(_function(call)["name"])
            is_named = writes_names or name in str(call_id)
            if not is_named or not (call_id or writes_ids):
                call = {**call, "id": f"functions.{name}:{number}"}
            calls.append((call_id, name, call.get("id")))
            shown.append(call)
            number += 1
        items.append({**message, CALLS: shown} if shown else message)
    return items


def _answer(result: Message, calls: Sequence[_Call], place: int) -> Message:
    """Return the result in a place behind calls with the id and name of its call."""
    call_id, name = result.get("tool_call_id"), result.get("name")
    ordered = [*calls[place:], *calls[:place]]
    fits = [call for call in ordered if (call[0] == call_id if call_id else call[1] == name)]
    for old, called, shown in (fits or calls[place : place + 1])[:1]:
        result = {**result, "name": name or called}
        if shown and call_id in (None, old):
            result["tool_call_id"] = shown
    return result


def caller(call_id: str, name: str, arguments: str = "{}") -> Message:
    """Return an assistant's message with one call."""
    return {"role": ASSISTANT, "content": "", CALLS: [call_of(call_id, name, arguments)]}


def call_of(call_id: object, name: object, arguments: object) -> Message:
    """Return a call in OpenAI's form; arguments are JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _function(call: Message) -> Message:
    return cast("Message", call["function"])
