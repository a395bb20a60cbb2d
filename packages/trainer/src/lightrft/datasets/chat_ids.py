"""Messages of a client as token ids: the prompt of a conversation, and what follows a turn.

What was sampled is never rendered again. A conversation that goes on is rendered from a neutral
beginning whose assistant turn holds a random word, as in `lightrft.datasets.suffix`; what follows
that turn is what is appended. Texts of messages are encoded so that none of them can become a
special token or the place of an image.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, cast

from lightrft.datasets.chat_template import in_either_form
from lightrft.datasets.messages import Message, with_objects
from lightrft.datasets.rendered import PieceIds, Rendered
from lightrft.datasets.text_ids import frame_ids
from lightrft.engines.media.media import TEXT_ENCODER, Encoder
from lightrft.engines.media.sources import ImageSource
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.media import VisionPrompts

# The content of a message is here a text, or a tuple of texts and images in order.
# Of a text among messages: number of its message, and of the part in it.
Slot = tuple[int, int]
_IMAGE = {"type": "image"}
# Of images that are rendered at once: what decoding them may take is known before.
MAX_IMAGES = 64
MAX_PIXELS = 1 << 25


class RenderingError(ValueError):
    """The chat template cannot render a conversation; the message says why."""


class ImageRenderingError(RenderingError):
    """An image of a conversation cannot be shown; the message says why."""


class ChatIds:
    """Token ids of conversations by a model's chat template.

    Args:
        tokenizer: With a chat template.
        end_of_turn: Id that ends an assistant turn; None where the next turn's first token does.
        encoder: Encoder of images.
        renderer: Applies the template where that is the processor's; None is the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_of_turn: int | None,
        *,
        encoder: Encoder = TEXT_ENCODER,
        renderer: PreTrainedTokenizerBase | VisionPrompts | None = None,
    ) -> None:
        self.tokenizer, self._end = tokenizer, end_of_turn
        self.encoder, self.renderer = encoder, renderer or tokenizer
        name = None if end_of_turn is None else tokenizer.convert_ids_to_tokens(end_of_turn)
        self._end_text = str(name or "")
        added = tokenizer.added_tokens_decoder.items()
        ids = {*tokenizer.all_special_ids, *(i for i, each in added if each.special)}
        # Some processors look for a name that is no token of its own.
        places = (tokenizer.convert_tokens_to_ids(name) for name in encoder.placeholders)
        self._places = {i for i in places if i not in (None, tokenizer.unk_token_id)}
        ids |= self._places
        self.special_ids = frozenset(ids)
        self._names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in sorted(ids)}
        longest_first = sorted({*self._names, *encoder.placeholders}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._pieces = PieceIds(self.encode_text, encoder, end_of_turn, self._end_text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        """Return a conversation from its beginning, up to where the assistant speaks.

        It has the ids that the template's whole text has, but for texts that hold the name of a
        special token: those are encoded apart.

        Raises:
            RenderingError: The template refuses it, or a call or a tool names a special token.
        """
        self._check_frames(messages, tools)
        frame, texts = self._cut(messages, _slots(messages, self.forges), self._whole(tools))
        return self._joined(messages, frame, lambda own: self._pieces.whole(frame, texts, own))

    def suffix(
        self, turn: Sequence[int], calls: Sequence[Message], messages: Sequence[Message]
    ) -> Rendered:
        """Return what follows a sampled turn: its missing end, further messages, the next header.

        Args:
            turn: Sampled ids.
            calls: In the turn, as a message has them.
            messages: What came after it.

        Raises:
            RenderingError: The template refuses them after such a turn.
        """
        self._check_frames(messages, ())
        frame, texts = self._cut(messages, _slots(messages, bool), self._after(calls))
        return self._joined(
            messages, frame, lambda own: self._pieces.after(turn, frame, texts, own)
        )

    def text(self, text: str) -> Rendered:
        """Return a text that the model is to continue; no part of it is a special token."""
        ids = [*frame_ids(self.tokenizer)[0], *self.encode_text(text, split_special_tokens=True)]
        self._refuse_places(ids)
        return Rendered(tuple(ids))

    def forges(self, text: str) -> bool:
        """Return whether a text holds the name of a special token."""
        return self._pattern.search(text) is not None

    def specials_of(self, text: str) -> list[int]:
        """Return special tokens of a text that the chat template wrote, in their order."""
        found = self._pattern.findall(text)
        return [self._names[name] for name in found if name in self._names]

    def _check_frames(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuse special tokens where they cannot be told from the template's own."""
        # Templates write arguments as they were sent, or as the objects that they mean.
        forms = [*messages]
        for each in messages:
            with suppress(RenderingError):
                forms.append(for_template(each, as_text=False))
        framed = [(each.get("tool_calls"), each.get("name")) for each in forms]
        if self.forges(json.dumps([*framed, *tools], ensure_ascii=False)):
            raise RenderingError("a call or a tool holds the name of a special token")

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        def apply(given: Sequence[Message]) -> str:
            shown = self.renderer.apply_chat_template(
                list(given), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
            return cast("str", shown)

        try:
            return in_either_form(apply, [for_template(each, as_text=True) for each in messages])
        except Exception as error:
            raise RenderingError(
                f"the chat template refuses the messages: {str(error)[:200]}"
            ) from error

    def _whole(self, tools: Sequence[Message]) -> Callable[[Sequence[Message]], str]:
        return lambda messages: self._render(messages, tools)

    def _after(self, calls: Sequence[Message]) -> Callable[[Sequence[Message]], str]:
        """Render what follows a turn with such calls."""
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
        slots: Sequence[Slot],
        render: Callable[[Sequence[Message]], str],
    ) -> tuple[list[str], list[str]]:
        """Return the template's pieces around some texts, and these as the template writes them."""
        marks = {slot: f"Q{secrets.token_hex(8)}Z" for slot in slots}

        def shown(real: Slot | None = None) -> str:
            return render(_filled(messages, {s: mark for s, mark in marks.items() if s != real}))

        rest, frame = shown(), list[str]()
        for mark in marks.values():
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise RenderingError("the chat template drops, moves or repeats a message")
            frame.append(before)
        frame.append(rest)
        # One rendering where it tells; one for each text where a template writes it otherwise.
        given = [str(parts_of(messages[n])[part]) for n, part in marks]
        texts = _fitting(frame, given, render(messages)) if marks else []
        if texts is None:
            pairs = zip(marks, given, strict=True)
            texts = [self._written(slot, frame, marks, shown, text) for slot, text in pairs]
        return frame, texts

    @staticmethod
    def _written(
        slot: Slot,
        frame: list[str],
        marks: dict[Slot, str],
        shown: Callable[[Slot | None], str],
        text: str,
    ) -> str:
        """Return a text as the template writes it: trimmed, as JSON ...; else as it is."""
        names, place = list(marks.values()), list(marks).index(slot)
        before = "".join(piece + name for piece, name in zip(frame, names[:place], strict=False))
        before += frame[place]
        after = frame[place + 1] + "".join(
            name + piece for name, piece in zip(names[place + 1 :], frame[place + 2 :], strict=True)
        )
        whole = shown(slot)
        fits = len(whole) >= len(before) + len(after)
        if fits and whole.startswith(before) and whole.endswith(after):
            return whole[len(before) : len(whole) - len(after)]
        return text

    def _joined(
        self,
        messages: Sequence[Message],
        frame: Sequence[str],
        join: Callable[[list[ImageSource]], Rendered],
    ) -> Rendered:
        """Return the pieces with the images of messages."""
        images = [part for part in chain(*map(parts_of, messages)) if not isinstance(part, str)]
        if sum(map(self.encoder.num_places, frame)) != len(images):
            raise ImageRenderingError("the chat template drops or repeats an image")
        try:
            _check_sizes(images)
            found = join(images)
        except (ValueError, TypeError, IndexError) as error:
            if not images:
                raise
            raise ImageRenderingError(f"an image cannot be shown: {first_line(error)}") from error
        for start, stop in found.text_spans:
            self._refuse_places(found.token_ids[start:stop])
        return found

    def _refuse_places(self, ids: Sequence[int]) -> None:
        """Some places are no special tokens, and stay what they are in texts."""
        if not self._places.isdisjoint(ids):
            raise RenderingError("a text holds what the model reads as the place of an image")

    def encode_text(self, text: str, **options: bool) -> list[int]:
        """Return the ids of a text without special tokens of its own."""
        found = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return cast("list[int]", found)


def _fitting(frame: Sequence[str], texts: Sequence[str], whole: str) -> list[str] | None:
    """Return the texts, each as it is or stripped, if with the frame they make up the whole."""
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


def parts_of(message: Message) -> tuple[str | ImageSource, ...]:
    """Return the texts and images of a message, in order."""
    content = message["content"]
    return content if isinstance(content, tuple) else (cast("str", content),)


def _slots(messages: Sequence[Message], is_wanted: Callable[[str], bool]) -> list[Slot]:
    """Return those texts of messages that are wanted, alone or with the others of their message."""
    found = []
    for number, each in enumerate(messages):
        texts = {i: part for i, part in enumerate(parts_of(each)) if isinstance(part, str)}
        # Templates may write two texts with an image between them as one.
        are_wanted = is_wanted("".join(texts.values()))
        found += [(number, i) for i, text in texts.items() if are_wanted or is_wanted(text)]
    return found


def _check_sizes(images: Sequence[ImageSource]) -> None:
    """Raise a ValueError for more than can be decoded at once, by the headers of files."""
    if len(images) > MAX_IMAGES:
        raise ValueError(f"{len(images)} new images at once: at most {MAX_IMAGES} are read")
    num_pixels = sum(width * height for width, height in (image.size() for image in images))
    if num_pixels > MAX_PIXELS:
        raise ValueError(
            f"the new images have {num_pixels} pixels: at most {MAX_PIXELS} are read at once; "
            "scale them"
        )


def _filled(messages: Sequence[Message], texts: Mapping[Slot, str]) -> list[Message]:
    """Return the messages with other texts."""
    found: list[Message] = []
    for number, each in enumerate(messages):
        parts = [texts.get((number, i), part) for i, part in enumerate(parts_of(each))]
        is_parts = isinstance(each["content"], tuple)
        found.append({**each, "content": tuple(parts) if is_parts else parts[0]})
    return found


def for_template(message: Message, *, as_text: bool) -> Message:
    """A message whose calls have their arguments as an object, or as JSON; images are parts."""
    if isinstance(message["content"], tuple):
        own = parts_of(message)
        parts = [{"type": "text", "text": p} if isinstance(p, str) else _IMAGE for p in own]
        message = {**message, "content": parts}
    try:
        return message if as_text else with_objects(message)
    except ValueError as error:
        raise RenderingError("the arguments of a call are no JSON") from error


def _with_mark(call: Message, mark: str) -> Message:
    function = cast("Message", call["function"])
    return {**call, "function": {**function, "arguments": json.dumps({"value": mark})}}
