"""Independent check that the model saw what the client sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import cast

from lightrft.datasets.chat_ids import ChatIds, for_template
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import ImageSource
from lightrft.records.media import encode_context
from lightrft.rollout.agents.conversations import CalledTurn, template_messages
from lightrft.rollout.agents.messages import Message


def fault_of(row: Sequence[CalledTurn], chat: ChatIds) -> str:
    """Return the first fault in the context of a row's turns; "" if there is none.

    Args:
        row: Turns of the row.
        chat: Special tokens, chat template, and the tokenizer that encodes all of it.
    """
    for number, turn in enumerate(row):
        fault = _fault_before(turn, chat)
        is_broken = number > 0 and turn.parent is not row[number - 1]
        if fault or is_broken:
            return f"turn {number}: {fault or 'it does not follow the turn before it'}"
    return ""


def _fault_before(turn: CalledTurn, chat: ChatIds) -> str:
    messages, parent = turn.call.messages, turn.parent
    if not messages:
        return "" if not _specials(turn.before.token_ids[1:], chat) else "a text has special tokens"
    if not are_sent(chain(*(each.images for each in turn.later)), turn):
        return "other images were shown than were sent"
    if parent is None:
        return _fault_of_prompt(turn, chat)
    earlier = parent.call.messages
    if [m.key for m in messages[: len(earlier)]] != [m.key for m in earlier]:
        return "its history is another conversation's"
    if not _says(parent, messages[len(earlier)], chat):
        return "its history has another answer than the one that was sampled"
    return _fault_of_suffix(turn, messages[len(earlier) + 1 :], chat)


def are_sent(images: Iterable[ImageSource], turn: CalledTurn) -> bool:
    """Return whether the images equal those that the client sent for a turn, in order."""
    return [image.digest for image in images] == [image.digest for image in turn.call.images]


def _fault_of_suffix(turn: CalledTurn, new: Sequence[Message], chat: ChatIds) -> str:
    """Check that only new messages and the template's special tokens were appended."""
    ids, spans = turn.before.token_ids, turn.before.text_spans
    texts = [text for message in new for text in message.texts]
    if len(texts) != len(spans):
        return "another number of messages was shown than was sent"
    for text, (start, stop) in zip(texts, spans, strict=True):
        forms = text, text.strip(), json.dumps(text), json.dumps(text, ensure_ascii=False)
        if ids[start:stop] not in [_ids(form, chat, split_special_tokens=True) for form in forms]:
            return "another text was shown than was sent"
    try:
        media = encode_context(ids, None, turn.before.later, chat.encoder)
    except ValueError:
        return "the places of images are not those that the processor makes"
    # Chat templates write one placeholder for each image.
    shown = _specials(ids if media is None else media.request_token_ids, chat)
    written = None if _forges(turn, chat) else _written_after(turn, new, chat)
    if written is not None and shown != written:
        return "other special tokens were shown than the chat template writes"
    return ""


def _fault_of_prompt(turn: CalledTurn, chat: ChatIds) -> str:
    """Check that a prompt has the ids that transformers returns for the whole conversation."""
    if _forges(turn, chat):
        return ""
    media = Media({"image": turn.call.images})
    for text in filter(None, _rendered(turn, len(turn.call.messages), chat, asks=True)):
        ids = chat.encoder.kept(text, media).token_ids if media else _ids(text, chat)
        if ids == turn.before.token_ids:
            return ""
    return "the prompt has other tokens than the chat template gives it"


def _rendered(turn: CalledTurn, count: int, chat: ChatIds, *, asks: bool) -> Iterator[str]:
    """Yield texts of the first messages, with arguments as objects and as JSON; "" if refused."""
    messages = template_messages(turn.call.messages)[:count]
    for as_text in (False, True):
        try:
            text = chat.renderer.apply_chat_template(
                [for_template(each, as_text=as_text) for each in messages],
                tools=list(turn.call.tools) or None,
                tokenize=False,
                add_generation_prompt=asks,
            )
            yield cast("str", text)
        except Exception:  # noqa: BLE001 - a template is a program of its author
            yield ""


def _written_after(
    turn: CalledTurn,
    new: Sequence[Message],
    chat: ChatIds,
) -> list[int] | None:
    """Return the special tokens that the template writes after a turn; None if it is unclear.

    The conversations with and without new messages both contain the turn, so their difference is
    what follows it.
    """
    count = len(turn.call.messages)
    wholes = _rendered(turn, count, chat, asks=True)
    heads = _rendered(turn, count - len(new), chat, asks=False)
    for whole, before in zip(wholes, heads, strict=True):
        if not (whole and before):
            continue
        first, all_of = chat.specials_of(before), chat.specials_of(whole)
        if all_of[: len(first)] != first:
            return None
        answer = turn.parent.sampled.output_token_ids if turn.parent else ()
        ends = first[-1:] if answer and answer[-1:] != tuple(first[-1:]) else []
        return [*ends, *all_of[len(first) :]]
    return None


def _forges(turn: CalledTurn, chat: ChatIds) -> bool:
    return any(chat.forges("".join(message.texts)) for message in turn.call.messages)


def _specials(ids: Sequence[int], chat: ChatIds) -> list[int]:
    return [token for token in ids if token in chat.special_ids]


def _says(turn: CalledTurn, message: Message, chat: ChatIds) -> bool:
    """Return whether a message is the answer that was sampled in a turn."""
    said = str(chat.tokenizer.decode(turn.sampled.output_token_ids, skip_special_tokens=True))
    return message.role == "assistant" and said.startswith(message.text)


def _ids(text: str, chat: ChatIds, **options: bool) -> tuple[int, ...]:
    encoded = chat.tokenizer(text, add_special_tokens=False, **options)
    return tuple(cast("list[int]", encoded["input_ids"]))
