"""OpenAI's Responses protocol: strict parsing of requests, whole or streamed answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from lightrft.datasets.chat_template import call_of
from lightrft.rollout.agents.conversations import CalledTurn
from lightrft.rollout.agents.http_server import HttpResponse
from lightrft.rollout.agents.messages import (
    ChatCall,
    Json,
    check_names,
    read_chat,
    read_parts,
    refused,
)
from lightrft.rollout.agents.replies import stream_of, whole_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Options that chat requests have, too.
_SAME = (
    *("model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls"),
    *("metadata", "store", "user", "safety_identifier", "prompt_cache_key", "service_tier"),
)
_NAMES = frozenset({*_SAME, "max_output_tokens", "input", "instructions", "tools"})
# Unsupported options, with the values beside null that are accepted as they change nothing.
_NOTHING: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "stream_options": ({},),
    **dict.fromkeys(("previous_response_id", "conversation", "max_tool_calls", "prompt"), ()),
}
# Fields of items by their types, and those that are ignored.
_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
_LABELS = ("type", "id", "status")
_PARTS = ("input_text", "output_text", "text", "input_image")


def read_response(body: Json) -> ChatCall:
    """Parse a request of `/v1/responses`; it must hold the whole history, as nothing is stored.

    Source: OpenAI's reference of the Responses API.

    Raises:
        HttpError: The request is malformed or needs an unsupported feature, which is named.
    """
    check_names(body, _NAMES, _NOTHING, advice="give the whole history as input")
    content = body.get("input")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(items, list) or not items:
        raise refused("input must be a text or a list of at least one item", "input")
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for number, item in enumerate(items):
        _add(messages, f"input[{number}]", item)
    same: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    same["max_tokens"] = body.get("max_output_tokens")
    tools = body.get("tools") or []
    shown = [_tool(item) for item in tools] if isinstance(tools, list) else tools
    return read_chat({**same, "messages": messages, "tools": shown})


def reply_response(
    call: ChatCall, turns: Sequence[CalledTurn], model: str, tokenizer: PreTrainedTokenizerBase
) -> HttpResponse:
    """Return the answer to a call.

    Args:
        call: The request.
        turns: Exactly one turn.
        model: Name of the model.
        tokenizer: Unused.
    """
    del tokenizer
    (turn,) = turns
    name = f"{turn.request_id:016x}"
    num_read, num_sampled = len(turn.context), len(turn.sampled.output_token_ids)
    is_cut = turn.sampled.finish_reason == "length"
    begun: Json = {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", **cast("Json", tool["function"])} for tool in call.tools],
        "usage": None,
    }
    whole: Json = {
        **begun,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(turn, name, "incomplete" if is_cut else "completed"),
        "usage": {
            "input_tokens": num_read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_read + num_sampled,
        },
    }
    if not call.options.is_streamed:
        return whole_answer(whole)
    events = enumerate(_events(begun, whole))
    return stream_of({**event, "sequence_number": number} for number, event in events)


def _add(messages: list[Json], where: str, item: object) -> None:
    """Append an item; an assistant's text and calls are separate items but one message."""
    fields: Json = item if isinstance(item, dict) else {"type": None}
    kind = str(fields.get("type", "message"))
    if kind not in _ITEMS:
        raise refused(f"{where}: items of type {kind[:60]!r} are not supported", "input")
    check_names(fields, (*_ITEMS[kind], *_LABELS), {}, where=where)
    call_id = fields.get("call_id")
    if kind == "message":
        content = _parts(where, fields.get("content"))
        messages.append({"role": fields.get("role"), "content": content})
    elif kind == "function_call_output":
        content = _parts(where, fields.get("output"))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        before = cast("list[Json]", messages[-1].get("tool_calls", []))
        called = call_of(call_id, fields.get("name"), fields.get("arguments"))
        messages[-1]["tool_calls"] = [*before, called]


def _parts(where: str, content: object) -> list[Json]:
    """Convert content to the form of chat requests."""
    parts: list[Json] = []
    for kind, part in read_parts(where, content, _PARTS):
        if kind == "input_image":
            image = {"url" if n == "image_url" else n: v for n, v in part.items() if n != "type"}
            parts.append({"type": "image_url", "image_url": image})
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts


def _tool(item: object) -> Json:
    if not isinstance(item, dict) or item.get("type") != "function":
        raise refused("each of tools must be a function of the client's own", "tools")
    fields = {name: value for name, value in item.items() if name != "type" and value is not None}
    return {"type": "function", "function": fields}


def _output(turn: CalledTurn, name: str, status: str) -> list[Json]:
    message, items = turn.message, list[Json]()
    if message.text or not message.calls:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        fields: Json = {"role": "assistant", "status": status, "content": [part]}
        items.append({"type": "message", "id": f"msg_{name}", **fields})
    for number, call in enumerate(message.calls):
        facts: Json = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "id": f"fc_{name}{number}", **facts})
        items[-1]["status"] = "completed"
    return items


def _events(begun: Json, whole: Json) -> Iterator[Json]:
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(cast("list[Json]", whole["output"])):
        place: Json = {"item_id": item["id"], "output_index": index}
        is_text = item["type"] == "message"
        added = {**item, "content" if is_text else "arguments": [] if is_text else ""}
        added["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if is_text:
            (part,) = cast("list[Json]", item["content"])
            place["content_index"] = 0
            yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
            said: Json = {**place, "logprobs": []}
            yield {"type": "response.output_text.delta", **said, "delta": part["text"]}
            yield {"type": "response.output_text.done", **said, "text": part["text"]}
            yield {"type": "response.content_part.done", **place, "part": part}
        else:
            arguments, kind = item["arguments"], "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **place, "delta": arguments}
            yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}
