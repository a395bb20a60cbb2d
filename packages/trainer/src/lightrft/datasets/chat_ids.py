"""Messages of a client as token ids: the prompt of a conversation, and what follows a turn.

What was sampled is never rendered again. A conversation that goes on is rendered from a neutral
beginning whose assistant turn holds a random word, as in `lightrft.datasets.suffix`; what follows
that turn is what is appended. Texts of messages are encoded so that none of them can become a
special token.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, object]
# Arguments of calls stand in some templates as objects, in others as JSON.
_FORMS = (False, True)


class RenderingError(ValueError):
    """The chat template cannot render a conversation; the message says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages as token ids.

    Args:
        token_ids: Of them.
        text_spans: [start, stop) of those that are text from outside and were encoded apart.
    """

    token_ids: tuple[int, ...]
    text_spans: tuple[tuple[int, int], ...] = ()


class ChatIds:
    """Token ids of conversations by a model's chat template.

    Args:
        tokenizer: With a chat template.
        end_of_turn: Id that ends an assistant turn; None where the next turn's first token does.
        arguments: Variables of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn: int | None) -> None:
        self._tokenizer, self._end = tokenizer, end_of_turn
        name = None if end_of_turn is None else tokenizer.convert_ids_to_tokens(end_of_turn)
        self._end_text = str(name or "")
        added = tokenizer.added_tokens_decoder.items()
        ids = {*tokenizer.all_special_ids, *(i for i, each in added if each.special)}
        self.special_ids = frozenset(ids)
        self._names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in sorted(ids)}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        """A conversation from its beginning, up to where the assistant speaks.

        It has the ids that the template's whole text has, but for texts that hold the name of a
        special token: those are encoded apart.

        Raises:
            RenderingError: The template refuses it, or a call or a tool names a special token.
        """
        self._check_frames(messages, tools)
        forging = [n for n, each in enumerate(messages) if self.forges(str(each["content"]))]
        frame, texts = self._cut(messages, forging, self._whole(tools))
        return self._joined(frame, texts, self._ids)

    def suffix(
        self, turn: Sequence[int], calls: Sequence[Message], messages: Sequence[Message]
    ) -> Rendered:
        """What follows a sampled turn: its missing end, further messages, the next header.

        Args:
            turn: Sampled ids.
            calls: In the turn, as a message has them.
            messages: What came after it.

        Raises:
            RenderingError: The template refuses them after such a turn.
        """
        self._check_frames(messages, ())
        filled = [n for n, each in enumerate(messages) if each["content"]]
        frame, texts = self._cut(messages, filled, self._after(calls))
        last = next(reversed(turn), None)
        own = [] if self._end is None or self._end == last else [self._end]
        # Without an end of turns, the stop token that was sampled is the next turn's first.
        skips = self._end is None and self._ids(frame[0])[:1] == [last]
        found = self._joined(frame, texts, self._anchored)
        ids = found.token_ids[1:] if skips else found.token_ids
        shift = len(own) - int(skips)
        spans = tuple((start + shift, stop + shift) for start, stop in found.text_spans)
        return Rendered((*own, *ids), spans)

    def text(self, text: str) -> Rendered:
        """A text that the model is to continue; no part of it is a special token."""
        ids = self._tokenizer(text, split_special_tokens=True)["input_ids"]
        return Rendered(tuple(cast("list[int]", ids)))

    def forges(self, text: str) -> bool:
        """Whether a text holds the name of a special token."""
        return self._pattern.search(text) is not None

    def specials_of(self, text: str) -> list[int]:
        """Special tokens of a text that the chat template wrote, in their order."""
        return [self._names[name] for name in self._pattern.findall(text)]

    def _check_frames(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuses special tokens where they cannot be told from the template's own."""
        framed = [(each.get("tool_calls"), each.get("name")) for each in messages]
        if self.forges(json.dumps([*framed, *tools], ensure_ascii=False)):
            raise RenderingError("a call or a tool holds the name of a special token")

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        problem = ""
        for as_text in _FORMS:
            given = [with_arguments(each, as_text=as_text) for each in messages]
            try:
                return cast(
                    "str",
                    self._tokenizer.apply_chat_template(
                        cast("list[dict[str, str]]", given),
                        tools=list(tools) or None,
                        tokenize=False,
                        add_generation_prompt=True,
                    ),
                )
            except Exception as error:  # noqa: BLE001 - a template is a program of its author
                problem = problem or str(error)[:200]
        raise RenderingError(f"the chat template refuses the messages: {problem}")

    def _whole(self, tools: Sequence[Message]) -> Callable[[Sequence[Message]], str]:
        return lambda messages: self._render(messages, tools)

    def _after(self, calls: Sequence[Message]) -> Callable[[Sequence[Message]], str]:
        """Renders what follows a turn with such calls."""
        mark = f"Q{secrets.token_hex(8)}Z"
        marked = [_with_mark(call, mark) for call in calls]

        def rest(messages: Sequence[Message]) -> str:
            turn: Message = {"role": "assistant", "content": "" if marked else mark}
            if marked:
                turn["tool_calls"] = marked
            opening: list[Message] = [{"role": "user", "content": "question"}, turn]
            try:
                rendered = self._render([*opening, *messages], ())
            except RenderingError:
                if len(marked) < 2:
                    raise
                turn["tool_calls"] = marked[-1:]  # Llama 3 writes one call a message
                rendered = self._render([*opening, *messages], ())
            _, found, after = rendered.rpartition(mark)
            if not found:
                raise RenderingError("the chat template drops what the assistant says")
            if self._end is not None:
                _, found, after = after.partition(self._end_text)
                if not found:
                    raise RenderingError("an assistant turn before others has no end")
                return after
            place = self._pattern.search(after)
            if place is None:
                raise RenderingError("nothing ends an assistant turn")
            return after[place.start() :]

        return rest

    def _cut(
        self,
        messages: Sequence[Message],
        marked: Sequence[int],
        render: Callable[[Sequence[Message]], str],
    ) -> tuple[list[str], list[str]]:
        """The template's pieces around some texts, and these as the template writes them."""
        marks = {number: f"Q{secrets.token_hex(8)}Z" for number in marked}

        def shown(real: int | None = None) -> str:
            found = [
                {**each, "content": marks[n]} if n in marks and n != real else each
                for n, each in enumerate(messages)
            ]
            return render(found)

        rest, frame = shown(), list[str]()
        for mark in marks.values():
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise RenderingError("the chat template drops, moves or repeats a message")
            frame.append(before)
        frame.append(rest)
        # One rendering where it tells; one for each text where a template writes it otherwise.
        given = [str(messages[number]["content"]) for number in marks]
        texts = _fitting(frame, given, render(messages)) if marks else []
        if texts is None:
            texts = [self._written(number, frame, marks, shown, messages) for number in marks]
        return frame, texts

    @staticmethod
    def _written(
        number: int,
        frame: list[str],
        marks: dict[int, str],
        shown: Callable[[int | None], str],
        messages: Sequence[Message],
    ) -> str:
        """A text as the template writes it: trimmed, as JSON ...; else as it is."""
        names, place = list(marks.values()), list(marks).index(number)
        before = "".join(piece + name for piece, name in zip(frame, names[:place], strict=False))
        before += frame[place]
        after = frame[place + 1] + "".join(
            name + piece for name, piece in zip(names[place + 1 :], frame[place + 2 :], strict=True)
        )
        whole = shown(number)
        fits = len(whole) >= len(before) + len(after)
        if fits and whole.startswith(before) and whole.endswith(after):
            return whole[len(before) : len(whole) - len(after)]
        return str(messages[number]["content"])

    def _joined(
        self, frame: Sequence[str], texts: Sequence[str], ids_of: Callable[[str], list[int]]
    ) -> Rendered:
        found, spans = ids_of(frame[0]), list[tuple[int, int]]()
        for text, piece in zip(texts, frame[1:], strict=True):
            start = len(found)
            found += self._ids(text, split_special_tokens=True)
            spans.append((start, len(found)))
            found += self._anchored(piece)
        return Rendered(tuple(found), tuple(spans))

    def _anchored(self, text: str) -> list[int]:
        """Ids of a piece of the template, as they are in the middle of a conversation."""
        # Some tokenizers put a space before the first word of a text, but not after the anchor.
        ids = self._ids(self._end_text + text)
        return ids if self._end is None else ids[1:]

    def _ids(self, text: str, **options: bool) -> list[int]:
        found = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return cast("list[int]", found)


def _fitting(frame: Sequence[str], texts: Sequence[str], whole: str) -> list[str] | None:
    """The texts, each as it is or stripped, if with the frame they make up the whole."""
    place, found = len(frame[0]), list[str]()
    if not whole.startswith(frame[0]):
        return None
    for text, piece in zip(texts, frame[1:], strict=True):
        forms = [form for form in (text, text.strip()) if whole.startswith(form + piece, place)]
        if not forms:
            return None
        found.append(forms[0])
        place += len(forms[0]) + len(piece)
    return found if place == len(whole) else None


def with_arguments(message: Message, *, as_text: bool) -> Message:
    """A message whose calls have their arguments as an object, or as JSON."""
    calls = cast("list[dict[str, object]]", message.get("tool_calls") or [])
    if as_text or not calls:
        return message
    found = []
    for call in calls:
        function = dict(cast("Message", call["function"]))
        try:
            function["arguments"] = json.loads(str(function["arguments"]))
        except (ValueError, RecursionError) as error:
            raise RenderingError("the arguments of a call are no JSON") from error
        found.append({**call, "function": function})
    return {**message, "tool_calls": found}


def _with_mark(call: Message, mark: str) -> Message:
    function = cast("Message", call["function"])
    return {**call, "function": {**function, "arguments": json.dumps({"value": mark})}}
