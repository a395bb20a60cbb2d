"""Tool calls in turns: choice of a model's parser, proved by its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lightrft.config import ConfigError
from lightrft.datasets.chat_template import RenderingError, template_of
from lightrft.datasets.messages import Message
from lightrft.kernels.names import first_line
from lightrft.rollout.environments.call_formats import (
    PARSERS,
    Arguments,
    CallParser,
    MalformedCallError,
    ToolCall,
    from_value,
)
from lightrft.rollout.environments.call_schema import checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = Mapping[str, object]
# Tool that takes the turns of environments without calls, and the actions of OpenEnv.
TURN_TOOL = "step"
# Column that chooses a row's environment if `--environment` is a dict; named as in TRL.
ENVIRONMENT_COLUMN = "environment"
_TRIED_TYPES = {"text": "string", "count": "integer", "is_on": "boolean", "each": "array"}
_TRIED: Arguments = {
    "text": 'Zürich, "A" <b> {c}\nend',
    "count": 7,
    "is_on": True,
    "each": [1, "x, y", {"k": 2.5}],
}
_TRIED_NAME = "find_in_q7"
# Ends of turns of various model families; parsers get turns without them.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>"),
    *("<|call|>", "<|endoftext|>", "<|observation|>", "<|user|>", "</s>"),
)


def whole_turn(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """Return the whole turn as one call, for environments that answer turns."""
    del is_ended, before
    return [ToolCall(TURN_TOOL, {"action": text})]


def choose_parser(
    name: str, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Schema]
) -> CallParser:
    """Return the parser of an option.

    The chat template renders a call, and the parser must read it back; otherwise correct calls of
    the model would be rejected. A template that renders no calls proves nothing.

    Args:
        name: Name in `PARSERS`, or "auto": the tokenizer's response template if it has one, else
            the parser that reads what the chat template writes.
        tokenizer: Tokenizer of the model.
        schemas: Schemas of the tools.

    Raises:
        ConfigError: The parser does not read what the chat template writes, or the tokenizer does
            not reveal the format.
    """
    if name == "auto" and vars(tokenizer).get("response_template") is not None:
        return _template_parser(tokenizer, schemas)
    template = str(tokenizer.chat_template or "")  # one template, or several by name
    turn, failure = _tried_turn(tokenizer, template)
    if name != "auto":
        if turn is not None and not _reads(PARSERS[name], *turn):
            fitting = [other for other in PARSERS if _reads(PARSERS[other], *turn)]
            advice = f"give --tool_parser {fitting[0]}" if fitting else "change one of the two"
            raise ConfigError(
                f"tool_parser {name} does not read the calls that the chat template writes, "
                f"{turn[0].strip()[:200]!r}: {advice}"
            )
        return PARSERS[name]
    if turn is not None:
        for parser in PARSERS.values():
            if _reads(parser, *turn):
                return parser
    elif "<tool_call>" in template:  # the template only describes calls
        return PARSERS["hermes"]
    reason = f" (it fails on a message with a call: {failure})" if failure else ""
    raise ConfigError(
        "tool_parser auto: the tokenizer has no response template, and its chat template writes no "
        f"known format of calls{reason}; give --tool_parser: {', '.join(PARSERS)}"
    )


@lru_cache(maxsize=16)
def _tried_turn(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[tuple[str, str] | None, str]:
    """Render a call; return the turn, None without one, and the text before it.

    The last item says why the template failed, if it accepted neither form of arguments.
    """
    del template  # only part of the cache's key
    properties = {name: {"type": kind} for name, kind in _TRIED_TYPES.items()}
    function = {
        "name": _TRIED_NAME,
        "description": "Finds.",
        "parameters": {"type": "object", "properties": properties},
    }
    tools: list[Message] = [{"type": "function", "function": function}]
    question: Message = {"role": "user", "content": "question"}
    arguments = json.dumps(_TRIED, ensure_ascii=False)
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": _TRIED_NAME, "arguments": arguments},
    }
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        render = template_of(tokenizer).render
        asked, opened = render([question], tools), render([question], tools, asks=True)
        whole = render([question, said], tools)
    except RenderingError as error:
        return None, str(error)
    header = opened.removeprefix(asked)
    for begun in (header, header.partition("<think>")[0], ""):
        if whole.startswith(asked + begun) and _TRIED_NAME in whole[len(asked + begun) :]:
            return (_cut(whole[len(asked + begun) :], tokenizer.eos_token), begun), ""
    return None, ""


def _cut(turn: str, eos: str | None) -> str:
    """Cut a turn at its end mark."""
    last = turn.rfind("2.5")
    ends = [place for end in (eos, *_ENDS) if end and (place := turn.find(end, last)) >= 0]
    return turn[: min(ends, default=len(turn))]


def _reads(parser: CallParser, turn: str, before: str) -> bool:
    try:
        calls = parser(turn, True, before)
        if [call.name for call in calls] != [_TRIED_NAME]:
            return False
        arguments = {
            name: checked(value, {"type": _TRIED_TYPES.get(name, "null")})
            for name, value in calls[0].arguments.items()
        }
    except ValueError:
        return False
    return arguments == _TRIED


def as_error(text: str) -> str:
    """Return an error message as an answer."""
    answer = json.dumps({"error": text}, ensure_ascii=False)
    return answer.encode("utf-8", "replace").decode()  # halves of surrogate pairs


def _template_parser(tokenizer: object, schemas: Sequence[Schema]) -> CallParser:
    tools = list(schemas)

    def parse(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
        del is_ended
        try:
            message = tokenizer.parse_response(text, prefix=before, tools=tools)  # type: ignore[attr-defined]
            calls = [call["function"] for call in message.get("tool_calls") or ()]
        except Exception as error:  # the author's template may raise anything on a model's text
            first = first_line(error)
            raise MalformedCallError(f"the calls cannot be read: {first}") from error
        return [from_value(call, ("arguments",)) for call in calls]

    return parse
