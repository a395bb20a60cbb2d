"""Answers in OpenAI's protocols: whole, or as a stream of events."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from lightrft.rollout.agents.conversations import CalledTurn, template_calls
from lightrft.rollout.agents.http_server import HttpResponse
from lightrft.rollout.agents.messages import ChatCall, Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reply(
    call: ChatCall, turns: Sequence[CalledTurn], model: str, tokenizer: PreTrainedTokenizerBase
) -> HttpResponse:
    """Return the answer to a call.

    Args:
        call: The request.
        turns: One turn per choice.
        model: Name of the model.
        tokenizer: Decoder of tokens for clients that request logprobs.
    """
    is_chat = call.text is None
    kind = "chat.completion" if is_chat else "text_completion"
    head: Json = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{turns[0].request_id:016x}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }
    logprobs = [_logprobs(call, turn, tokenizer) for turn in turns]
    if call.options.is_streamed:
        if is_chat:
            head["object"] = "chat.completion.chunk"
        return stream_of(_events(call, head, turns, logprobs), end=b"data: [DONE]\n\n")
    choices = [
        {
            "index": number,
            **({"message": _message(turn.message)} if is_chat else {"text": turn.message.text}),
            "logprobs": logprobs[number],
            "finish_reason": finish_reason(turn),
        }
        for number, turn in enumerate(turns)
    ]
    return whole_answer({**head, "choices": choices, "usage": usage(turns)})


def whole_answer(body: Json) -> HttpResponse:
    """Return an answer that is not streamed."""
    return HttpResponse(200, json.dumps(body).encode())


def stream_of(events: Iterable[Json], *, end: bytes = b"") -> HttpResponse:
    """Return events as a stream, each with the name of its type if it has one.

    The whole answer is known before its first event, so the stream is one body.
    """

    def line(event: Json) -> str:
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event)}\n\n"

    return HttpResponse(200, "".join(map(line, events)).encode() + end, "text/event-stream")


def finish_reason(turn: CalledTurn) -> str:
    """Return OpenAI's name for why an answer ended."""
    if turn.message.calls:
        return "tool_calls"
    return "length" if turn.sampled.finish_reason == "length" else "stop"


def usage(turns: Sequence[CalledTurn]) -> Json:
    """Return the token counts of a call."""
    prompt = len(turns[0].context)
    sampled = sum(len(turn.sampled.output_token_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _message(message: Message) -> Json:
    calls = template_calls(message.calls)
    fields: Json = {"role": "assistant", "content": message.text or (None if calls else "")}
    return {**fields, "tool_calls": calls} if calls else fields


def _logprobs(call: ChatCall, turn: CalledTurn, tokenizer: PreTrainedTokenizerBase) -> Json | None:
    if not call.options.wants_logprobs:
        return None
    ids, values = turn.sampled.output_token_ids, turn.sampled.output_logprobs
    texts = [_text_of(token, place, tokenizer) for place, token in enumerate(ids)]
    if call.text is not None:
        return {"tokens": texts, "token_logprobs": list(values)}
    return {
        "content": [
            {
                "token": text,
                "logprob": value,
                "bytes": _bytes_of(token, text, tokenizer),
                "top_logprobs": [],
            }
            for token, text, value in zip(ids, texts, values, strict=True)
        ],
        "refusal": None,
    }


def _text_of(token: int, place: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a token at its place: only the first one may lose its space."""
    alone, twice = (str(tokenizer.decode([token] * count)) for count in (1, 2))
    return twice[len(alone) :] if place else alone


def _bytes_of(token: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the bytes of a token, which may hold only a part of a character."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token)
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return [int(byte[1], 16)]
    known = _byte_of_letter()
    is_known = all(letter in known for letter in piece)
    return [known[letter] for letter in piece] if is_known else list(text.encode())


@cache
def _byte_of_letter() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _events(
    call: ChatCall, head: Json, turns: Sequence[CalledTurn], logprobs: Sequence[Json | None]
) -> Iterator[Json]:
    extra: Json = {"usage": None} if call.options.tells_usage else {}

    def event(**choice: object) -> Json:
        return {**head, "choices": [choice], **extra}

    for index, turn in enumerate(turns):
        message, end, values = turn.message, finish_reason(turn), logprobs[index]
        if call.text is not None:
            yield event(index=index, text=message.text, finish_reason=end, logprobs=values)
            continue
        said = {"role": "assistant", "content": message.text}
        yield event(index=index, delta=said, finish_reason=None, logprobs=values)
        for place, spoken in enumerate(template_calls(message.calls)):
            called = {"tool_calls": [{"index": place, **spoken}]}
            yield event(index=index, delta=called, finish_reason=None, logprobs=None)
        yield event(index=index, delta={}, finish_reason=end)
    if call.options.tells_usage:
        yield {**head, "choices": [], "usage": usage(turns)}
