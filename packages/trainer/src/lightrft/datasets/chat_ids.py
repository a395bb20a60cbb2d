"""Token ids of a client's messages: the prompt of a conversation, and what follows a turn.

Sampled text is never rendered again. To continue a conversation, a neutral one is rendered whose
assistant turn holds a random word, as in `lightrft.datasets.suffix`. Everything behind that turn is
appended. Texts of messages are encoded so that no part of them can become a special token or the
place of an image.
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
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.datasets.media import VisionPrompts

# The content of a message is here a text, or a tuple of texts and images in order.
# Place of a text among messages: number of its message, and of the part in it.
Slot = tuple[int, int]
_IMAGE = {"type": "image"}
# Bounds of images rendered at once: the cost of decoding them is known before.
MAX_IMAGES = 64
MAX_PIXELS = 1 << 25


class RenderingError(ValueError):
    """The chat template cannot render a conversation; the message says why."""


class ImageRenderingError(RenderingError):
    """An image of a conversation cannot be shown; the message says why."""


class ChatIds:
    """Token ids of conversations by a model's chat template.

    Args:
        tokenizer: Tokenizer with a chat template.
        end_of_turn: Id that ends an assistant turn; None if the next turn's first token does.
        encoder: Encoder of images.
        renderer: Renderer whose template is used (a processor's); None is the tokenizer.
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
        # Some processors look for a name that is not a token.
        places = (tokenizer.convert_tokens_to_ids(name) for name in encoder.placeholders)
        self._places = {i for i in places if i not in (None, tokenizer.unk_token_id)}
        ids |= self._places
        self.special_ids = frozenset(ids)
        self._names = {str(tokenizer.convert_ids_to_tokens(i)): i for i in sorted(ids)}
        longest_first = sorted({*self._names, *encoder.placeholders}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._pieces = PieceIds(self.encode_text, encoder, end_of_turn, self._end_text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Rendered:
        """Return a conversation from its beginning, up to the header of the assistant's turn.

        The ids are those of the template's whole text, except that texts with the name of a special
        token are encoded separately.

        Raises:
            RenderingError: The template refuses it, or a call or a tool names a special token.
        """
        self._check_frames(messages, tools)
        frame, texts = self._cut(messages, _slots(messages, self.forges), self._whole(tools))
        return self._joined(messages, frame, lambda own: self._pieces.whole(frame, texts, own))

    def suffix(
        self, turn: Sequence[int], calls: Sequence[Message], messages: Sequence[Message]
    ) -> Rendered:
        """Return the suffix of a sampled turn: its missing end, further messages, the next header.

        Args:
            turn: Sampled ids.
            calls: Calls of the turn, in the form of messages.
            messages: Messages behind the turn.

        Raises:
            RenderingError: The template refuses them after such a turn.
        """
        self._check_frames(messages, ())
        frame, texts = self._cut(messages, _slots(messages, bool), self._after(calls))
        return self._joined(
            messages, frame, lambda own: self._pieces.after(turn, frame, texts, own)
        )

    def text(self, text: str) -> Rendered:
        """Return the ids of a text that the model continues, without special tokens in it."""
        ids = [*frame_ids(self.tokenizer)[0], *self.encode_text(text, split_special_tokens=True)]
        self._refuse_places(ids)
        return Rendered(tuple(ids))

    def forges(self, text: str) -> bool:
        """Return whether a text holds the name of a special token."""
        return self._pattern.search(text) is not None

    def specials_of(self, text: str) -> list[int]:
        """Return the special tokens that the chat template wrote into a text, in order."""
        names = self._pattern.findall(text)
        return [self._names[name] for name in names if name in self._names]

    def _check_frames(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuse special tokens where they look like those of the template."""
        # Templates write arguments as sent, or as the objects that they encode.
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
        """Return a renderer of messages behind a turn with such calls."""
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
            _, matched, after = rendered.rpartition(mark)
            if not matched:
                raise RenderingError("the chat template drops what the assistant says")
            if self._end is not None:
                _, matched, after = after.partition(self._end_text)
                if not matched:
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
        """Return the template's pieces around some texts, and the texts as it writes them."""
        marks = {slot: f"Q{secrets.token_hex(8)}Z" for slot in slots}

        def shown(real: Slot | None = None) -> str:
            return render(_filled(messages, {s: mark for s, mark in marks.items() if s != real}))

        rest, frame = shown(), list[str]()
        for mark in marks.values():
            before, matched, rest = rest.partition(mark)
            if not matched or mark in rest:
                raise RenderingError("the chat template drops, moves or repeats a message")
            frame.append(before)
        frame.append(rest)
        # One rendering usually suffices; templates that change texts need one for each.
        originals = [str(parts_of(messages[n])[part]) for n, part in marks]
        texts = _fitting(frame, originals, render(messages)) if marks else []
        if texts is None:
            pairs = zip(marks, originals, strict=True)
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
        """Return a text as the template writes it (trimmed, as JSON ...); else unchanged."""
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
        """Join the pieces with the images of messages."""
        images = [part for part in chain(*map(parts_of, messages)) if not isinstance(part, str)]
        if sum(map(self.encoder.num_places, frame)) != len(images):
            raise ImageRenderingError("the chat template drops or repeats an image")
        try:
            _check_sizes(images)
            rendered = join(images)
        except (ValueError, TypeError, IndexError) as error:
            if not images:
                raise
            raise ImageRenderingError(f"an image cannot be shown: {first_line(error)}") from error
        for start, stop in rendered.text_spans:
            self._refuse_places(rendered.token_ids[start:stop])
        return rendered

    def _refuse_places(self, ids: Sequence[int]) -> None:
        """Refuse places of media in texts that the tokenizer does not treat as special tokens."""
        if not self._places.isdisjoint(ids):
            raise RenderingError("a text holds what the model reads as the place of an image")

    def encode_text(self, text: str, **options: bool) -> list[int]:
        """Return the ids of a text, without the tokens that the tokenizer adds."""
        ids = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return cast("list[int]", ids)


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


def _slots(messages: Sequence[Message], is_wanted: Callable[[str], bool]) -> list[Slot]:
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
        contents = parts_of(message)
        parts = [{"type": "text", "text": p} if isinstance(p, str) else _IMAGE for p in contents]
        message = {**message, "content": parts}
    try:
        return message if as_text else with_objects(message)
    except ValueError as error:
        raise RenderingError("the arguments of a call are no JSON") from error


def _with_mark(call: Message, mark: str) -> Message:
    function = cast("Message", call["function"])
    return {**call, "function": {**function, "arguments": json.dumps({"value": mark})}}
