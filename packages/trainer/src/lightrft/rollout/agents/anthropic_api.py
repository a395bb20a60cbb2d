"""Anthropic's Messages protocol: strict parsing of requests, whole or streamed answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "metadata")
_NAMES = frozenset({*_SAME, "messages", "system", "stop_sequences", "tools", "tool_choice"})
# Unsupported options, with the values beside null that are accepted as they change nothing.
_NOTHING: dict[str, tuple[object, ...]] = {
    "thinking": ({"type": "disabled"},),
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "mcp_servers": ([],),
}
# Fields of blocks by their types. Hints for caches do not change the answer.
_BLOCKS = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
_LABELS = ("type", "cache_control")


def read_messages(body: Json) -> ChatCall:
    """Parse a request of `/v1/messages`.

    Source: Anthropic's reference of the Messages API, version 2023-06-01.

    Raises:
        HttpError: The request is malformed or needs an unsupported feature, which is named.
    """
    check_names(body, _NAMES, _NOTHING)
    if body.get("max_tokens") is None:
        raise refused("max_tokens must be a whole number: it is missing", "max_tokens")
    items = body.get("messages")
    if not isinstance(items, list) or not items:
        raise refused("messages must be a list of at least one message", "messages")
    messages: list[Json] = [
        message for number, item in enumerate(items) for message in _messages(number, item)
    ]
    if body.get("system"):
        texts = _blocks("system", body["system"], "text")
        messages.insert(0, {"role": "system", "content": _joined(texts)})
    same: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    tools = body.get("tools") or []
    return read_chat(
        {
            **same,
            "messages": messages,
            "stop": body.get("stop_sequences") or None,
            "tools": [_tool(item) for item in tools] if isinstance(tools, list) else tools,
            "tool_choice": _choice(body.get("tool_choice")),
        }
    )


def reply_message(
    call: ChatCall, turns: Sequence[CalledTurn], model: str, tokenizer: PreTrainedTokenizerBase
) -> HttpResponse:
    """Return the answer to a call.

    Args:
        call: The request.
        turns: Exactly one turn.
        model: Name of the model.
        tokenizer: Decoder of the sampled tokens, whose text is searched for stop sequences.
    """
    (turn,) = turns
    reason, stop = _reason(call, turn, tokenizer)
    head: Json = {
        "id": f"msg_{turn.request_id:016x}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }
    ended: Json = {"stop_reason": reason, "stop_sequence": stop}
    size = len(turn.sampled.output_token_ids)
    if call.options.is_streamed:
        return stream_of(_events(head, _content(turn), ended, len(turn.context), size))
    usage = {"input_tokens": len(turn.context), "output_tokens": size}
    return whole_answer({**head, "content": _content(turn), **ended, "usage": usage})


def _messages(number: int, item: object) -> Iterator[Json]:
    """Yield a message in OpenAI's form, where each tool result is a separate message."""
    where = f"messages[{number}]"
    if not isinstance(item, dict) or item.get("role") not in ("user", "assistant"):
        raise refused(f"{where} must have the role user or assistant", "messages")
    check_names(item, ("role", "content"), {}, where=where)
    if item["role"] == "assistant":
        blocks = _blocks(where, item.get("content"), "text", "tool_use")
        calls = [_call(where, block) for block in blocks if block["type"] == "tool_use"]
        text = _joined(blocks)
        yield {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        return
    blocks = _blocks(where, item.get("content"), "text", "image", "tool_result")
    results = [block for block in blocks if block["type"] == "tool_result"]
    for block in results:
        content = _blocks(where, block.get("content") or "", "text", "image")
        yield {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _parts(where, content),
        }
    if len(results) < len(blocks):
        yield {"role": "user", "content": _parts(where, blocks)}


def _blocks(where: str, content: object, *kinds: str) -> list[Json]:
    blocks = []
    for kind, block in read_parts(where, content, kinds):
        check_names(block, (*_BLOCKS[kind], *_LABELS), {"citations": ([],)}, where=where)
        blocks.append(block)
    return blocks


def _parts(where: str, blocks: Sequence[Json]) -> list[Json]:
    """Convert texts and images to OpenAI's form."""
    parts: list[Json] = []
    for block in blocks:
        if block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            value = block.get("source")
            source: Json = value if isinstance(value, dict) else {}
            if source.get("type") != "base64":
                kind = str(source.get("type"))[:60]
                raise refused(
                    f"{where}: the source of an image must be of type base64: got {kind!r}; no "
                    "file is read and nothing is fetched",
                    "messages",
                )
            address = f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": address}})
    return parts


def _joined(blocks: Sequence[Json]) -> str:
    return "".join(str(block["text"]) for block in blocks if block["type"] == "text")


def _call(where: str, block: Json) -> Json:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise refused(f"{where}: the input of a tool_use must be an object", "messages")
    text = json.dumps(arguments, ensure_ascii=False)
    return call_of(block.get("id"), block.get("name"), text)


def _tool(item: object) -> Json:
    if not isinstance(item, dict) or item.get("type") not in (None, "custom"):
        raise refused("each of tools must be one of the client's own, with a name", "tools")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    check_names(item, (*names, *_LABELS), {}, where="tools")
    return {"type": "function", "function": {names[n]: v for n, v in item.items() if n in names}}


def _choice(given: object) -> object:
    """Convert a tool choice to OpenAI's form; `read_chat` refuses unknown values."""
    if not isinstance(given, dict) or given.get("disable_parallel_tool_use"):
        return given
    return given["type"] if given.get("type") in ("auto", "none") else given


def _reason(
    call: ChatCall, turn: CalledTurn, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str | None]:
    if turn.message.calls:
        return "tool_use", None
    text = tokenizer.decode(turn.sampled.output_token_ids)
    places = [(place, mark) for mark in call.options.stop if (place := text.find(mark)) >= 0]
    if places:
        return "stop_sequence", min(places)[1]
    return ("max_tokens" if turn.sampled.finish_reason == "length" else "end_turn"), None


def _content(turn: CalledTurn) -> list[Json]:
    message = turn.message
    blocks: list[Json] = [{"type": "text", "text": message.text}] if message.text else []
    for call in message.calls:
        fields = {"id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        blocks.append({"type": "tool_use", **fields})
    return blocks


def _events(
    head: Json, blocks: Sequence[Json], ended: Json, num_read: int, num_sampled: int
) -> Iterator[Json]:
    usage = {"input_tokens": num_read, "output_tokens": 0}
    begun: Json = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**begun, "usage": usage}}
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            start: Json = {"type": "text", "text": ""}
            delta: Json = {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": num_sampled}}
    yield {"type": "message_stop"}
