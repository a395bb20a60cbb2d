"""Strict parsing of requests in OpenAI's chat and text protocols; errors name the field."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from lightrft.config.files import finite_float, refuse_constant
from lightrft.rollout.agents.http_server import HttpError
from lightrft.rollout.environments.content import Parts, named

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource

Json = dict[str, object]
Role = Literal["system", "user", "assistant", "tool"]
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# The run's options win over these; a client's different value is reported once.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_NAMES = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "logprobs",
        *SAMPLING,
        # Ignored labels for whoever keeps logs.
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
    }
)
# Unsupported options, with the values beside null that are accepted as they change nothing.
_NOTHING: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "best_of": (1,),
    "echo": (False,),
    **dict.fromkeys(("top_logprobs", "frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("reasoning_effort", "verbosity", "audio", "prediction"), ()),
    **dict.fromkeys(("web_search_options", "suffix"), ()),
}
# Fields of messages beside role and content, and those of an assistant's that must be empty.
_FIELDS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
_EMPTY: tuple[object, ...] = ("", [], {})
_EMPTY_FIELDS = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "reasoning_content"), _EMPTY
)
MAX_CHOICES = 32
MAX_STOPS = 4
# What a value must be, and the function that tells.
Form = tuple[str, Callable[[object], bool]]
_FLAG: Form = ("true or false", lambda value: isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class SpokenCall:
    """A tool call in a message.

    Args:
        id: Identifier by which the tool's result refers to the call.
        name: Name of the tool.
        arguments: JSON text, exactly as it was sent.
    """

    id: str
    name: str
    arguments: str

    @property
    def key(self) -> tuple[str, str]:
        """Name and normalized arguments: equal for equal calls."""
        try:
            value = json.dumps(json.loads(self.arguments), sort_keys=True)
        except (ValueError, RecursionError):
            value = self.arguments
        return self.name, value


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    Args:
        role: Role of the speaker.
        text: The text, "" if there is none; images appear as their digests.
        calls: Tool calls of an assistant.
        call_id: Identifier of the call that a tool's result answers.
        content: Texts and images in order; () if there are no images.
    """

    role: Role
    text: str
    calls: tuple[SpokenCall, ...] = ()
    call_id: str = ""
    content: Parts = ()

    @property
    def shown(self) -> Parts:
        """Texts and images that the model sees, in order."""
        return self.content or (self.text,)

    @property
    def texts(self) -> list[str]:
        """Texts that are not empty."""
        return [part for part in self.shown if isinstance(part, str) and part]

    @property
    def images(self) -> list[ImageSource]:
        """Images of the message, in order."""
        return [part for part in self.content if not isinstance(part, str)]

    @property
    def key(self) -> object:
        """Key that is equal for equal messages; ignores the ids of an assistant's calls."""
        parts = [part if isinstance(part, str) else [part.digest] for part in self.content]
        return self.role, parts or self.text, [call.key for call in self.calls], self.call_id

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        size = sum(len(image.read()) for image in self.images)
        size += 4 * len(self.text) + sum(4 * len(call.arguments) for call in self.calls)
        return size + 400


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one request.

    Args:
        num_choices: Number of answers.
        max_tokens: Limit for one answer; None leaves it to the server.
        stop: Strings that end an answer; they are not part of its text.
        is_streamed, tells_usage: Whether the answer is a stream, and whether it reports usage.
        wants_logprobs: Whether to return log probabilities of the sampled tokens.
        sampling: The client's sampling options by name.
    """

    num_choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    is_streamed: bool = False
    tells_usage: bool = False
    wants_logprobs: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """Text that distinguishes calls with the same history; "" for default options."""
        options = (self.num_choices, self.max_tokens, self.stop, self.sampling.get("seed"))
        return "" if options == (1, None, (), None) else repr(options)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request for the next turn of a conversation or the continuation of a text.

    Args:
        messages: The whole history; () for a text.
        text: The text to continue; None for a conversation.
        tools: Schemas in the form that chat templates take.
        options: Options of the answer.
    """

    messages: tuple[Message, ...]
    text: str | None
    tools: tuple[Json, ...]
    options: CallOptions

    @property
    def images(self) -> list[ImageSource]:
        """Images of all messages, in order."""
        return [*chain(*(message.images for message in self.messages))]

    @property
    def tools_key(self) -> bytes:
        """Start of the digests of its histories, so that other tools make another conversation."""
        return _digest(b"", json.dumps(self.tools, sort_keys=True))

    @property
    def fingerprint(self) -> bytes:
        """Digest that is equal for equal requests."""
        asked = repr((self.text, self.options.mark))
        return _digest([self.tools_key, *chain_of(self.tools_key, self.messages)][-1], asked)


def chain_of(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of each prefix of a conversation, shortest first."""
    digests = []
    for message in messages:
        start = _digest(start, json.dumps(message.key))
        digests.append(start)
    return digests


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "replace"), digest_size=16).digest()


def read_json(data: bytes) -> Json:
    """Return the JSON object of a body.

    Raises:
        HttpError: The body is not a JSON object.
    """
    try:
        body = json.loads(data, parse_constant=refuse_constant, parse_float=finite_float)
        # Halves of surrogate pairs cannot be encoded, and no tokenizer takes them.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError, MemoryError):
        raise HttpError(400, "the body must be a JSON object", code="invalid_json") from None
    if not isinstance(body, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    return body


def read_chat(body: Json) -> ChatCall:
    """Parse a request of `/v1/chat/completions`.

    Raises:
        HttpError: The request is malformed or needs an unsupported feature, which is named.
    """
    check_names(body, _NAMES, _NOTHING)
    if "prompt" in body:
        raise refused("a chat has messages, and no prompt", "prompt")
    messages = _messages(body.get("messages"))
    tools = _tools(body)
    return ChatCall(messages, None, tools, _options(body, _FORMS))


def read_text(body: Json) -> ChatCall:
    """Parse a request of `/v1/completions`.

    Raises:
        HttpError: The request is malformed or needs an unsupported feature, which is named.
    """
    check_names(body, _NAMES, _NOTHING)
    for name in ("messages", "tools", "tool_choice"):
        if name in body:
            raise refused(f"{name} is not supported: ask /v1/chat/completions", name)
    text = body.get("prompt")
    if not isinstance(text, str) or not text:
        raise refused(f"prompt must be a text: got {_shown(text)}", "prompt")
    return ChatCall((), text, (), _options(body, _TEXT_FORMS))


def check_names(
    item: Json,
    names: Collection[str],
    nothing: Mapping[str, tuple[object, ...]],
    *,
    where: str = "",
    advice: str = "leave it out",
) -> None:
    """Refuse names in an object that are unknown or would change something.

    Args:
        item: The request, or an object in it.
        names: Supported names.
        nothing: Unsupported names, with the values beside null that change nothing.
        where: Place of the object in the request; "" for the request itself.
        advice: Advice to a client that gives another value.
    """
    for name, value in item.items():
        place = f"{where}.{name[:60]}" if where else name[:60]
        parameter = where.partition("[")[0] or name
        if name in nothing and value is not None and value not in nothing[name]:
            raise refused(f"{place} is not supported with {_shown(value)}: {advice}", parameter)
        if name not in names and name not in nothing:
            raise refused(f"{place} is not supported", parameter)


def read_parts(where: str, content: object, kinds: Collection[str]) -> Iterator[tuple[str, Json]]:
    """Yield the parts of a content with their types; a text is one part.

    Args:
        where: Place of the content in the request.
        content: Text, or list of parts.
        kinds: Supported types of parts; those of texts have a field `text`.

    Raises:
        HttpError: It is neither, or a part has another type.
    """
    parameter = where.partition("[")[0]
    if isinstance(content, str):
        content = [{"type": next(iter(kinds)), "text": content}]
    if not isinstance(content, list):
        raise refused(f"{where} must be a text or a list of parts", parameter)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise refused(f"{where}: parts of type {_shown(kind)} are not supported", parameter)
        if kind.endswith("text") and not isinstance(part.get("text"), str):
            raise refused(f"{where}: a part of type {kind} has a text", parameter)
        yield kind, part


def refused(text: str, name: str) -> HttpError:
    """Return the error that refuses a parameter."""
    return HttpError(400, text, code=f"unsupported_parameter:{name[:60]}")


def _shown(value: object) -> str:
    return repr(value)[:60]


def _whole(low: int, high: int) -> Form:
    """Return the form of whole numbers."""

    def is_right(value: object) -> bool:
        return type(value) is int and low <= value <= high

    return f"a whole number from {low} to {high}", is_right


def _is_number(value: object) -> bool:
    # A whole number may be too large for a float.
    return type(value) in (int, float) and abs(cast("float", value)) <= sys.float_info.max


def _are_stops(value: object) -> bool:
    texts = value if isinstance(value, list) else [value] if value else []
    return len(texts) <= MAX_STOPS and all(isinstance(text, str) and text for text in texts)


def _are_stream_options(value: object) -> bool:
    names = {"include_usage", "include_obfuscation"}
    return isinstance(value, dict) and value.keys() <= names


_FORMS: Mapping[str, Form] = {
    "n": _whole(1, MAX_CHOICES),
    "max_tokens": _whole(1, 2**31),
    "max_completion_tokens": _whole(1, 2**31),
    "stop": (f"a text or at most {MAX_STOPS} of them", _are_stops),
    "stream": _FLAG,
    "stream_options": ("an object with include_usage only", _are_stream_options),
    "logprobs": _FLAG,
    **dict.fromkeys(SAMPLING, ("a number", _is_number)),
}
# Here the value is a number of alternatives.
_TEXT_FORMS = {**_FORMS, "logprobs": ("0, as there are no alternatives", _whole(0, 0)[1])}


def _options(body: Json, forms: Mapping[str, Form]) -> CallOptions:
    asked = {name: body[name] for name in forms if body.get(name) is not None}
    for name, value in asked.items():
        form, is_right = forms[name]
        if not is_right(value):
            raise refused(f"{name} must be {form}: got {_shown(value)}", name)
    limits = [asked[name] for name in ("max_tokens", "max_completion_tokens") if name in asked]
    stop = asked.get("stop") or []
    return CallOptions(
        cast("int", asked.get("n", 1)),
        min(cast("list[int]", limits), default=None),
        (stop,) if isinstance(stop, str) else tuple(cast("list[str]", stop)),
        bool(asked.get("stream")),
        bool(cast("Json", asked.get("stream_options", {})).get("include_usage")),
        asked.get("logprobs", False) is not False,
        {name: cast("float", asked[name]) for name in SAMPLING if name in asked},
    )


def _tools(body: Json) -> tuple[Json, ...]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refused(
            f"tool_choice {_shown(choice)} is not supported: nothing forces a model to call; give "
            "auto or none",
            "tool_choice",
        )
    if not isinstance(tools, list):
        raise refused("tools must be a list of functions", "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or cast("Json", tool).get("type") != "function":
            raise refused("each of tools must be a function with a name", "tools")
        if cast("Json", function).get("strict"):
            raise refused("tools with strict are not supported: nothing forces a form", "tools")
    return () if choice == "none" else tuple(tools)


def _messages(found: object) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise refused("messages must be a list of at least one message", "messages")
    messages = tuple(_message(number, item) for number, item in enumerate(found))
    if messages[-1].role == "assistant":
        raise refused("the last message must not be the assistant's", "messages")
    return messages


def _message(number: int, item: object) -> Message:
    where = f"messages[{number}]"
    fields: Json = item if isinstance(item, dict) else {}
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise refused(f"{where}.role must be one of {', '.join(_ROLES)}", "messages")
    nothing = _EMPTY_FIELDS if role == "assistant" else {}
    check_names(fields, ("role", "content", *_FIELDS.get(role, ())), nothing, where=where)
    calls = _calls(where, fields.get("tool_calls") or [])
    content = _content(where, fields.get("content"), takes_images=role in ("user", "tool"))
    text = named(content)
    if not text and not calls and fields.get("content") is None:
        raise refused(f"{where} has no content", "messages")
    call_id = fields.get("tool_call_id", "")
    if role == "tool" and (not isinstance(call_id, str) or not call_id):
        raise refused(f"{where} needs the tool_call_id of the call that it answers", "messages")
    return Message(role, text, calls, str(call_id), () if content in ((), (text,)) else content)


def _content(where: str, content: object, *, takes_images: bool) -> Parts:
    """Return texts and images in order, with adjacent texts joined."""
    if content is None:
        return ()
    kinds = ("text", "image_url") if takes_images else ("text",)
    parts = [
        str(part["text"]) if kind == "text" else _image(where, part)
        for kind, part in read_parts(f"{where}.content", content, kinds)
    ]
    runs = groupby(parts, key=lambda part: isinstance(part, str))
    joined = [[named(tuple(run))] if is_text else [*run] for is_text, run in runs]
    return tuple(part for part in chain(*joined) if part)


def _image(where: str, part: Json) -> ImageSource:
    """Decode an image from its data URL; no file is read and nothing is fetched."""
    from lightrft.engines.media.files import MediaError
    from lightrft.engines.media.sources import ImageSource, as_image

    address = part.get("image_url")
    fields: Json = address if isinstance(address, dict) else {}
    check_names(
        {**part, **fields},
        ("type", "image_url", "url"),
        {"detail": ("auto",)},
        where=f"{where}.image_url",
        advice="sizes are options of the run (--max_pixels)",
    )
    head, _, data = str(fields.get("url")).partition(",")
    if not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise refused(
            f"{where}: an image_url must be a data URL (data:image/png;base64,...): got "
            f"{_shown(fields.get('url'))}; no file is read and nothing is fetched",
            "messages",
        )
    try:
        image = as_image(f"data:,{data}", name=f"{where}: an image", folder=Path())
    except MediaError as error:
        raise HttpError(400, str(error), code="invalid_image") from error
    # Named by its content, so that its place in the history does not matter.
    return ImageSource(f"image {image.digest[:16]}", content=image.content)


def _calls(where: str, found: object) -> tuple[SpokenCall, ...]:
    calls = []
    for call in found if isinstance(found, list) else [None]:
        item: Json = call if isinstance(call, dict) else {}
        function = item.get("function")
        if not isinstance(function, dict):
            raise refused(f"{where}.tool_calls must be calls of functions", "messages")
        values = item.get("id"), function.get("name"), function.get("arguments")
        if not all(isinstance(value, str) for value in values):
            raise refused(f"{where}.tool_calls: a call has an id, a name, arguments", "messages")
        call_id, name, arguments = map(str, values)
        is_bare = arguments.strip() in ("", "null")
        calls.append(SpokenCall(call_id, name, "{}" if is_bare else arguments))
    return tuple(calls)
