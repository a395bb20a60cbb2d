"""Token ids of conversations: a prompt, what follows a sampled turn, and the end of a turn.

Every stage and command gets its ids here. Sampled text is never rendered again: templates strip
thinking, move system messages and join differently. To continue a conversation, a neutral one is
rendered whose assistant turn holds a random word. Everything behind that turn is appended. Texts
of others are encoded so that no part of them can become a special token or the place of an image;
otherwise a tool could speak as somebody else. Images stand where the template puts them; the
processor that expands their places reads only the template's pieces.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, cast

from lightrft.datasets.chat_template import (
    CALL_ID,
    QUESTION,
    RenderingError,
    caller,
    template_of,
)
from lightrft.datasets.media import Modality, TextModality
from lightrft.datasets.messages import Message, with_objects
from lightrft.datasets.text_ids import frame_ids
from lightrft.datasets.types import DataError
from lightrft.engines.media.media import LaterImages, Media
from lightrft.engines.text import text_behind_answer
from lightrft.engines.types import SamplingParams
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.engines.media.sources import ImageSource

# The content of a message is here a text, or a tuple of texts and images in order.
# Place of a text among messages: number of its message, and of the part in it.
Slot = tuple[int, int]
_IMAGE = {"type": "image"}
# Bounds of a client's images rendered at once: the cost of decoding them is known before.
MAX_IMAGES = 64
MAX_PIXELS = 1 << 25


_CALLING = caller(CALL_ID, "function")
CALL = cast("Sequence[Message]", _CALLING["tool_calls"])[0]
_RESULT: Message = {"role": "tool", "content": "result"}
_ANSWER: Message = {"role": "assistant", "content": "answer"}


class ImageRenderingError(RenderingError):
    """An image of a conversation cannot be shown; the message says why."""


class TemplateRefusedError(RenderingError):
    """The chat template cannot carry turns; the message says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages as token ids.

    Args:
        token_ids: Ids of the messages.
        text_spans: [start, stop) of external texts, which were encoded separately.
        later: Images in the messages; they start at places of `token_ids`.
    """

    token_ids: tuple[int, ...]
    text_spans: tuple[tuple[int, int], ...] = ()
    later: tuple[LaterImages, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """End of an assistant's turn.

    Args:
        token: Id that ends the last turn; None if the first token of the next turn does.
        text: Special token that ends a turn before others; "" if the next turn's first does.
    """

    token: int | None
    text: str


class ChatIds:
    """Token ids of conversations by a model's chat template.

    Args:
        tokenizer: Tokenizer of the model.
        modality: Renderer and encoder of prompts; None is that of a text model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, modality: Modality | None = None
    ) -> None:
        modality = modality or TextModality(tokenizer)
        self.tokenizer, self.encoder = tokenizer, modality.encoder
        self.renderer = modality.renderer
        self.template = template_of(self.renderer)
        # Some processors look for a name that is not a token.
        places = (tokenizer.convert_tokens_to_ids(name) for name in self.encoder.placeholders)
        self._places = {i for i in places if i not in (None, tokenizer.unk_token_id)}
        self.special_ids = special_ids(tokenizer) | self._places
        self._names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in sorted(self.special_ids)}
        longest_first = sorted({*self._names, *self.encoder.placeholders}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id that ends an assistant turn; None if the next turn's first token does.

        Raises:
            TemplateRefusedError: There is no template, or it fails on a question and an answer or
                drops the answer.
        """
        if not self.renderer.chat_template:
            raise TemplateRefusedError(
                "conversations need a chat template, and the tokenizer has none: give "
                "--chat_template FILE, use an instruct model, or (to train) rows with prompt and "
                "completion"
            )
        try:
            rest = text_behind_answer(self.renderer, self.tokenizer.eos_token)
        except Exception as error:  # a template is a program of the model's author
            raise refused(f"it fails on an assistant turn: {error}") from error
        if rest is None:
            raise refused("it drops what the assistant says")
        first = self.encode_text(rest.lstrip())[:1]
        return first[0] if first and first[0] in self.special_ids else None

    @cached_property
    def _ends(self) -> dict[bool, TurnEnd]:
        """Ends of turns, by whether they have calls."""
        end = self.end_of_turn
        ends = TurnEnd(end, self._end_in_history())
        try:
            return {False: ends, True: ends if end is None else self._end_of_calls(ends)}
        except RenderingError:  # it writes no calls, or no results
            return {False: ends, True: ends}

    def _end_in_history(self) -> str:
        """Return the token that ends an answer before a question; "" if the latter's first does."""
        end = self.end_of_turn
        text = "" if end is None else str(self.tokenizer.convert_ids_to_tokens(end))
        with suppress(RenderingError):
            rest = self._rest((), [QUESTION])
            # gpt-oss ends its last answer otherwise than those before it.
            if text and text not in rest and (place := self._pattern.match(rest.lstrip())):
                return place[0]
        return text

    def _end_of_calls(self, ends: TurnEnd) -> TurnEnd:
        """Return the end of a turn with calls: that of others, or the last token of the text."""
        rest = self._rest([CALL], ()).rstrip()
        if ends.text in rest:
            return ends
        written = [place for place in self._pattern.finditer(rest) if place.end() == len(rest)]
        names = [place[0] for place in written if place[0] in self._names]
        if not names or names[0] not in self._rest([CALL], [_RESULT]):
            return ends
        return TurnEnd(self._names[names[0]], names[0])

    def end_of(self, message: Message) -> int | None:
        """Return the id that ends an assistant's message; None if the next turn's first does."""
        return self._ends[bool(message.get("tool_calls"))].token

    def first_behind(self, message: Message, following: Sequence[Message]) -> int | None:
        """Return the special token that a template without end of turns writes behind a turn.

        Args:
            message: The assistant's message.
            following: The message behind it; without one, a question or the result of a call.

        Returns:
            None if it writes none.
        """
        calls = cast("Sequence[Message]", message.get("tool_calls") or ())
        following = following or [_RESULT if calls else QUESTION]
        try:
            ids = self.encode_text(self._behind(calls, following, asks=False))
        except RenderingError:
            return None
        return ids[0] if ids and ids[0] in self.special_ids else None

    @property
    def ends_otherwise(self) -> bool:
        """Return whether a turn before others ends in another token than the last one (gpt-oss)."""
        return any(
            each.token is not None and self._names.get(each.text) != each.token
            for each in self._ends.values()
        )

    @property
    def _stops(self) -> frozenset[int]:
        """Ids that end a turn by the template."""
        ends = {each.token for each in self._ends.values()}
        if self.end_of_turn is None:
            ends |= {self.first_behind(turn, ()) for turn in (_CALLING, _ANSWER)}
        return frozenset(each for each in ends if each is not None)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a sampled turn and are not part of its text."""
        eos = self.tokenizer.eos_token_id
        return self._stops | (frozenset() if eos is None else {eos})

    def with_end_of_turn(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that also stop where the template ends a turn."""
        further = sorted(self._stops.difference(params.stop_token_ids))
        return replace(params, stop_token_ids=(*params.stop_token_ids, *further))

    @cached_property
    def header_ids(self) -> list[int]:
        """Ids that a prompt has before the assistant's turn, behind a question."""
        asked, plain = (self.render([QUESTION], asks=asks) for asks in (True, False))
        return self.encode_text(asked.removeprefix(plain))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        """Return a client's conversation, up to the header of the assistant's turn.

        The ids are those of the template's whole text, except that texts with the name of a special
        token are encoded separately.

        Raises:
            RenderingError: The template refuses it, or a call or a tool names a special token.
        """
        self._check_client(messages, tools)
        render = partial(self.render, tools=tools)
        frame, texts = self._cut(messages, slots_of(messages, self.forges), render, may_refuse=True)
        return self._without_places(self._joined(messages, frame, texts, None))

    def suffix(
        self, turn: Sequence[int], calls: Sequence[Message], messages: Sequence[Message]
    ) -> Rendered:
        """Return the suffix of a sampled turn: its missing end, a client's messages, the header.

        Args:
            turn: Sampled ids.
            calls: Calls of the turn, in the form of messages.
            messages: Messages behind the turn.

        Raises:
            RenderingError: The template refuses them after such a turn.
        """
        self._check_client(messages, ())
        slots = slots_of(messages, bool)
        return self._without_places(self.after(turn, calls, messages, slots, may_refuse=True))

    def after(
        self,
        turn: Sequence[int],
        calls: Sequence[Message],
        messages: Sequence[Message],
        slots: Sequence[Slot],
        *,
        may_refuse: bool = False,
    ) -> Rendered:
        """Return the suffix of a sampled turn for messages that nobody else wrote.

        Args:
            turn, calls, messages: See `suffix`.
            slots: Places of the external texts.
            may_refuse: Whether the template may refuse a text; otherwise it is left unchanged.

        Raises:
            RenderingError: The template refuses such messages, or an image cannot be shown.
        """
        frame, texts = self.pieces(calls, messages, slots, may_refuse=may_refuse)
        return self._joined(messages, frame, texts, turn, has_calls=bool(calls))

    def pieces(
        self,
        calls: Sequence[Message],
        messages: Sequence[Message],
        slots: Sequence[Slot],
        *,
        may_refuse: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Return the template's pieces behind a turn, one more than texts, and the texts.

        Args:
            calls, messages, slots, may_refuse: See `after`.

        Raises:
            RenderingError: The template refuses such messages.
        """
        render = partial(self._behind, calls)
        return self._cut(messages, slots, render, may_refuse=may_refuse)

    def takes_id(self, call_id: str) -> bool:
        """Return whether the template takes an id of a call and its result."""
        try:
            self._behind([{**CALL, "id": call_id}], [_RESULT])
        except RenderingError:
            return False
        return True

    def text(self, text: str) -> Rendered:
        """Return the ids of a text that the model continues, without special tokens in it."""
        ids = [*frame_ids(self.tokenizer)[0], *self.encode_text(text, split_special_tokens=True)]
        self._without_places(Rendered(tuple(ids), ((0, len(ids)),)))
        return Rendered(tuple(ids))

    def forges(self, value: object) -> bool:
        """Return whether a text, or a text in an object, holds the name of a special token."""
        return any(map(self._pattern.search, _texts_in(value)))

    def specials_of(self, text: str) -> list[int]:
        """Return the special tokens that the chat template wrote into a text, in order."""
        names = self._pattern.findall(text)
        return [self._names[name] for name in names if name in self._names]

    def _check_client(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuse special tokens where they look like those of the template, and large images."""
        # Templates write arguments as sent, or as the objects that they encode.
        forms = [*messages]
        for each in messages:
            with suppress(RenderingError):
                forms.append(for_template(each, as_text=False))
        keys = ("tool_calls", "name", "tool_call_id")
        framed = [[each.get(key) for key in keys] for each in forms]
        if self.forges([framed, tools]):
            raise RenderingError("a call or a tool holds the name of a special token")
        images = _images(messages)
        with _readable(images):
            _check_sizes(images)

    def _without_places(self, rendered: Rendered) -> Rendered:
        """Refuse places of media in texts that the tokenizer does not treat as special tokens."""
        for start, stop in rendered.text_spans:
            if not self._places.isdisjoint(rendered.token_ids[start:stop]):
                raise RenderingError("a text holds what the model reads as the place of an image")
        return rendered

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, asks: bool = True
    ) -> str:
        """Return the text of messages, up to the header of the assistant's turn if it `asks`.

        Raises:
            RenderingError: The template refuses them.
        """
        shown = [for_template(each, as_text=True) for each in messages]
        return self.template.render(shown, tools, asks=asks)

    def _behind(
        self, calls: Sequence[Message], messages: Sequence[Message], *, asks: bool = True
    ) -> str:
        """Return the text of messages behind a turn with such calls."""
        after = self._rest(calls, messages, asks=asks)
        end = self._ends[bool(calls)].text
        if end:
            _, matched, after = after.partition(end)
            if not matched:
                raise RenderingError("an assistant turn before others has no end")
            return after
        place = self._pattern.search(after)
        if place is None:
            raise RenderingError("nothing ends an assistant turn")
        return after[place.start() :]

    def _rest(
        self, calls: Sequence[Message], messages: Sequence[Message], *, asks: bool = False
    ) -> str:
        """Return the text behind a random word in a turn, with messages behind the turn."""
        mark = f"Q{secrets.token_hex(8)}Z"
        marked = [_with_mark(call, mark) for call in calls]
        turn: Message = {"role": "assistant", "content": "" if marked else mark}
        if marked:
            turn["tool_calls"] = marked
        opening = [QUESTION, turn]
        try:
            rendered = self.render([*opening, *messages], asks=asks)
        except RenderingError:
            if len(marked) < 2:
                raise
            turn["tool_calls"] = marked[-1:]  # Llama 3 writes one call a message
            rendered = self.render([*opening, *messages], asks=asks)
        _, matched, after = rendered.rpartition(mark)
        if not matched:
            raise RenderingError("the chat template drops what the assistant says")
        return after

    def _cut(
        self,
        messages: Sequence[Message],
        slots: Sequence[Slot],
        render: Callable[[Sequence[Message]], str],
        *,
        may_refuse: bool,
    ) -> tuple[list[str], list[str]]:
        """Return the template's pieces around some texts, and the texts as it writes them."""
        marks = {slot: f"Q{secrets.token_hex(8)}Z" for slot in slots}

        def shown(real: Sequence[Slot]) -> str:
            texts = {slot: mark for slot, mark in marks.items() if slot not in real}
            try:
                return render(_filled(messages, texts))
            except RenderingError:
                if may_refuse or not real:
                    raise
                return ""

        rest, frame = shown(()), list[str]()
        for mark in marks.values():
            before, matched, rest = rest.partition(mark)
            if not matched or mark in rest:
                raise RenderingError("the chat template drops, moves or repeats a message")
            frame.append(before)
        frame.append(rest)
        if sum(map(self.encoder.num_places, frame)) != len(_images(messages)):
            raise ImageRenderingError("the chat template drops or repeats an image")
        # One rendering usually suffices; templates that change texts need one for each.
        originals = [str(parts_of(messages[n])[part]) for n, part in marks]
        texts = _fitting(frame, originals, shown(slots)) if marks else []
        if texts is None:
            names, pairs = [*marks.values()], enumerate(zip(marks, originals, strict=True))
            texts = [_written(i, frame, names, shown([slot]), text) for i, (slot, text) in pairs]
        return frame, texts

    def _joined(
        self,
        messages: Sequence[Message],
        frame: Sequence[str],
        texts: Sequence[str],
        turn: Sequence[int] | None,
        *,
        has_calls: bool = False,
    ) -> Rendered:
        """Return the ids of pieces with the texts between them and the images of messages.

        Args:
            messages: Messages with the images.
            frame: Pieces of the template, one more than texts.
            texts: Texts between the pieces.
            turn: Sampled ids before them; None at the beginning of a conversation.
            has_calls: Whether the turn calls tools.
        """
        images = _images(messages)
        left, ids = [*images], list[int]()
        spans, later = list[tuple[int, int]](), list[LaterImages]()
        anchor, first = "", None
        if turn is not None:
            end, last = self._ends[has_calls], next(reversed(turn), None)
            # Without an end of turns, the sampled stop token is the next turn's first.
            anchor, first = end.text, last if end.token is None else None
            written = self._names.get(end.text)
            ids += [] if written is None or last in (end.token, written) else [written]
        for index, piece in enumerate(frame):
            if index:
                start, anchor, first = len(ids), self._ends[has_calls].text, None
                ids += self.encode_text(texts[index - 1], split_special_tokens=True)
                spans.append((start, len(ids)))
            shown = tuple(left[: self.encoder.num_places(piece)])
            del left[: len(shown)]
            # Some tokenizers put a space before the first word of a text, but not after the anchor.
            whole = anchor + piece
            with _readable(images):
                new = self._piece_ids(whole, shown)
            skipped = int(bool(anchor)) + (first is not None and new[:1] == [first])
            if shown:
                later.append(LaterImages(len(ids), skipped, whole, shown))
            ids += new[skipped:]
        return Rendered(tuple(ids), tuple(spans), tuple(later))

    def _piece_ids(self, piece: str, images: tuple[ImageSource, ...]) -> list[int]:
        if not images:
            return self.encode_text(piece)
        return [*self.encoder.kept(piece, Media({"image": images})).token_ids]

    def encode_text(self, text: str, **options: bool) -> list[int]:
        """Return the ids of a text, without the tokens that the tokenizer adds.

        With `split_special_tokens` nothing becomes a special token.
        """
        ids = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return cast("list[int]", ids)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens, also of those without a role such as that of eos."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset({*tokenizer.all_special_ids, *(i for i, each in added if each.special)})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id that ends a turn of the chat template; None without template or turns."""
    try:
        return ChatIds(tokenizer).end_of_turn
    except DataError:
        return None


def refused(reason: str) -> TemplateRefusedError:
    """Return the error that refuses a chat template."""
    return TemplateRefusedError(
        f"the chat template cannot carry turns: {reason}; give another with --chat_template FILE"
    )


@contextmanager
def _readable(images: Sequence[ImageSource]) -> Iterator[None]:
    """Turn errors of a processor about images into errors about what is shown."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        if not images:
            raise
        raise ImageRenderingError(f"an image cannot be shown: {first_line(error)}") from error


def _written(place: int, frame: Sequence[str], names: Sequence[str], whole: str, text: str) -> str:
    """Return a text as the template writes it (trimmed, as JSON ...); else unchanged.

    Args:
        place: Number of the text.
        frame: Pieces around all texts.
        names: Marks that stand for the others.
        whole: Rendering with this text and marks.
        text: The text.
    """
    pairs = [*zip(frame, names, strict=False)]
    before = "".join(piece + name for piece, name in pairs[:place]) + frame[place]
    after = frame[place + 1] + "".join(
        name + piece for name, piece in zip(names[place + 1 :], frame[place + 2 :], strict=True)
    )
    fits = len(whole) >= len(before) + len(after)
    if fits and whole.startswith(before) and whole.endswith(after):
        return whole[len(before) : len(whole) - len(after)]
    return text


def _fitting(frame: Sequence[str], texts: Sequence[str], whole: str) -> list[str] | None:
    """Return the texts, plain or stripped, if together with the frame they make up the whole."""
    place, fitting = len(frame[0]), list[str]()
    if not whole.startswith(frame[0]):
        return None
    for text, piece in zip(texts, frame[1:], strict=True):
        forms = [form for form in (text, text.strip()) if whole.startswith(form + piece, place)]
        if not forms:
            return None
        fitting.append(forms[0])
        place += len(forms[0]) + len(piece)
    return fitting if place == len(whole) else None


def parts_of(message: Message) -> tuple[str | ImageSource, ...]:
    """Return the texts and images of a message, in order."""
    content = message["content"]
    return content if isinstance(content, tuple) else (cast("str", content),)


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in an object of JSON, with the keys."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting += (*each, *each.values())
        elif isinstance(each, Sequence):
            waiting += each


def _images(messages: Sequence[Message]) -> list[ImageSource]:
    """Return the images of messages, in order."""
    return [part for part in chain(*map(parts_of, messages)) if not isinstance(part, str)]


def slots_of(messages: Sequence[Message], is_wanted: Callable[[str], bool]) -> list[Slot]:
    """Return the wanted texts of messages; a message whose joined text is wanted counts whole."""
    slots = []
    for number, each in enumerate(messages):
        texts = {i: part for i, part in enumerate(parts_of(each)) if isinstance(part, str)}
        # Templates may write two texts with an image between them as one.
        are_wanted = is_wanted("".join(texts.values()))
        slots += [(number, i) for i, text in texts.items() if are_wanted or is_wanted(text)]
    return slots


def _check_sizes(images: Sequence[ImageSource]) -> None:
    """Raise a ValueError for more pixels than can be decoded at once, by the headers of files."""
    if len(images) > MAX_IMAGES:
        raise ValueError(f"{len(images)} new images at once: at most {MAX_IMAGES} are read")
    num_pixels = sum(width * height for width, height in (image.size() for image in images))
    if num_pixels > MAX_PIXELS:
        raise ValueError(
            f"the new images have {num_pixels} pixels: at most {MAX_PIXELS} are read at once; "
            "scale them"
        )


def _filled(messages: Sequence[Message], texts: Mapping[Slot, str]) -> list[Message]:
    """Return the messages with these texts in their slots."""
    filled: list[Message] = []
    for number, each in enumerate(messages):
        parts = [texts.get((number, i), part) for i, part in enumerate(parts_of(each))]
        is_parts = isinstance(each["content"], tuple)
        filled.append({**each, "content": tuple(parts) if is_parts else parts[0]})
    return filled


def for_template(message: Message, *, as_text: bool) -> Message:
    """Return a message with call arguments as an object or as JSON, and images as parts."""
    if isinstance(message["content"], tuple):
        message = {**message, "content": _content(parts_of(message))}
    try:
        return message if as_text else with_objects(message)
    except ValueError as error:
        raise RenderingError("the arguments of a call are no JSON") from error


def _content(parts: Sequence[str | ImageSource]) -> object:
    """Return texts and images as a template takes them: one text if there are no images."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    shown = ({"type": "text", "text": p} if isinstance(p, str) else _IMAGE for p in parts)
    return [each for each in shown if each.get("text") != ""]


def _with_mark(call: Message, mark: str) -> Message:
    function = cast("Message", call["function"])
    return {**call, "function": {**function, "arguments": json.dumps({"value": mark})}}
