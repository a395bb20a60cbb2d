"""Ollama's chat protocol: strict parsing of requests, whole answers or lines of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lightrft.datasets.chat_template import call_of
from lightrft.rollout.agents.conversations import CalledTurn
from lightrft.rollout.agents.http_server import HttpResponse
from lightrft.rollout.agents.messages import ChatCall, Json, check_names, read_chat, refused
from lightrft.rollout.agents.replies import whole_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMES = ("model", "messages", "tools", "stream", "options")
_NOTHING: dict[str, tuple[object, ...]] = {
    "think": (False,),
    "keep_alive": ("5m",),
    "format": ("",),
}
_OPTIONS = {"num_predict": "max_tokens", "stop": "stop", "temperature": "temperature"}
_OPTIONS |= {name: name for name in ("top_p", "top_k", "min_p", "seed")}


def read_ollama(body: Json) -> ChatCall:
    """Parse a request of `/api/chat`.

    Source: Ollama's reference, https://github.com/ollama/ollama/blob/main/docs/api.md.

    Raises:
        HttpError: The request is malformed or needs an unsupported feature, which is named.
    """
    check_names(body, _NAMES, _NOTHING)
    options = body.get("options") or {}
    if not isinstance(options, dict):
        raise refused("options must be an object", "options")
    check_names(options, _OPTIONS, {}, where="options")
    items = body.get("messages")
    messages = [_message(number, item) for number, item in enumerate(_listed(items))]
    return read_chat(
        {
            "model": body["model"],
            "messages": messages,
            "tools": body.get("tools"),
            "stream": body.get("stream", True),
            **{_OPTIONS[name]: value for name, value in options.items()},
        }
    )


def reply_ollama(
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
    called = [
        {"function": {"name": each.name, "arguments": json.loads(each.arguments)}}
        for each in turn.message.calls
    ]
    message: Json = {"role": "assistant", "content": turn.message.text}
    if called:
        message["tool_calls"] = called
    head: Json = {"model": model, "created_at": datetime.now(UTC).isoformat()}
    ended: Json = {
        "done": True,
        "done_reason": "length" if turn.sampled.finish_reason == "length" else "stop",
        "prompt_eval_count": len(turn.context),
        "eval_count": len(turn.sampled.output_token_ids),
    }
    if not call.options.is_streamed:
        return whole_answer({**head, "message": message, **ended})
    lines: tuple[Json, ...] = (
        {**head, "message": message, "done": False},
        {**head, "message": {"role": "assistant", "content": ""}, **ended},
    )
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    return HttpResponse(200, text.encode(), "application/x-ndjson")


def _listed(items: object) -> Sequence[object]:
    if not isinstance(items, list) or not items:
        raise refused("messages must be a list of at least one message", "messages")
    return items


def _message(number: int, item: object) -> Json:
    """Convert a message to OpenAI's form; a result answers the last call of its tool."""
    where = f"messages[{number}]"
    if not isinstance(item, dict):
        raise refused(f"{where} must be an object", "messages")
    check_names(item, ("role", "content", "tool_calls", "tool_name"), {}, where=where)
    message: Json = {"role": item.get("role"), "content": item.get("content")}
    if item.get("role") == "tool":
        return {**message, "tool_call_id": item.get("tool_name")}
    if item.get("tool_calls"):
        message["tool_calls"] = [_call(where, call) for call in _listed(item["tool_calls"])]
    return message


def _call(where: str, call: object) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        raise refused(f"{where}: a tool call needs a function with arguments", "messages")
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return call_of(function.get("name"), function.get("name"), text)
