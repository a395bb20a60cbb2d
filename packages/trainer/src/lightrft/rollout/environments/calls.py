"""Tool calls in turns: a model's parser, proved by its chat template, and checks of arguments."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from lightrft.config import ConfigError
from lightrft.config.files import require_flat
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.chat_template import (
    CALL_ID,
    QUESTION,
    RenderingError,
    call_of,
    template_of,
)
from lightrft.datasets.messages import Message
from lightrft.datasets.suffix import ReadCalls
from lightrft.kernels.names import first_line
from lightrft.rollout.environments.call_formats import (
    PARSERS,
    Arguments,
    CallParser,
    MalformedCallError,
    ToolCall,
    from_value,
    read_calls,
    spoken,
)
from lightrft.rollout.environments.written_calls import parser_of_turn

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
_OTHERS = (("look_up_b2", "call00001"), ("sum_of_k9", "call00002"))
# Ends of turns of various model families; parsers get turns without them.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>"),
    *("<|call|>", "<|endoftext|>", "<|observation|>", "<|user|>", "</s>"),
)

# Limit of nested lists and objects in arguments: checkpoints nest them further.
_MAX_DEPTH = 100
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_CALL_ID = re.compile(r"[\w.:-]{1,64}")
_WORDS: dict[str, object] = {"True": True, "False": False, "None": None}


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
            the first parser that reads what the chat template writes, else one that is read off it.
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
    fitting = {} if turn is None else _fitting_parsers(*turn, _other_turn(tokenizer, template))
    if name == "auto" and turn is None and "<tool_call>" in template:  # it only describes calls
        return PARSERS["hermes"]
    if name == "auto" and fitting:
        return next(iter(fitting.values()))
    if name == "auto":
        reason = f" (it fails on a message with a call: {failure})" if failure else ""
        raise ConfigError(
            "tool_parser auto: the tokenizer has no response template, and no calls can be read "
            f"that its chat template writes{reason}; give --tool_parser: {', '.join(PARSERS)}"
        )
    if turn is not None and name not in fitting:
        advice = f"give --tool_parser {next(iter(fitting))}" if fitting else "change one of the two"
        raise ConfigError(
            f"tool_parser {name} does not read the calls that the chat template writes, "
            f"{turn[0].strip()[:200]!r}: {advice}"
        )
    return PARSERS[name]


@lru_cache(maxsize=16)
def _fitting_parsers(turn: str, before: str, others: tuple[str, str]) -> dict[str, CallParser]:
    """Return the parsers that read the tried call in a turn.

    "auto" is read off the turn itself, and must read another one, whose calls have other names.
    """
    call = ToolCall(_TRIED_NAME, _TRIED, CALL_ID)
    parsers = {name: each for name, each in PARSERS.items() if _reads(each, turn, before)}
    written = parser_of_turn(spoken(turn, before), call)
    names = [name for name, _ in _OTHERS if name in others[0]]
    is_right = written is not None and _reads(written, turn, before)
    if written is not None and is_right and names and _reads(written, *others, names=names):
        parsers["auto"] = written
    return parsers


def _other_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """Render two calls with other names and ids, or one; return the turn and the text before it."""
    for calls in (_OTHERS, _OTHERS[:1]):
        turn, _ = _tried_turn(tokenizer, template, calls)
        if turn is not None:
            return turn
    return "", ""


@lru_cache(maxsize=16)
def _tried_turn(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    calls: tuple[tuple[str, str], ...] = ((_TRIED_NAME, CALL_ID),),
) -> tuple[tuple[str, str] | None, str]:
    """Render calls, each of a name and an id; return the turn and the text before it.

    There is no turn if a call is missing in it. The last item says why the template failed, if it
    accepted neither form of arguments.
    """
    del template  # only part of the cache's key
    properties = {name: {"type": kind} for name, kind in _TRIED_TYPES.items()}
    function = {
        "name": _TRIED_NAME,
        "description": "Finds.",
        "parameters": {"type": "object", "properties": properties},
    }
    tools: list[Message] = [{"type": "function", "function": function}]
    arguments = json.dumps(_TRIED, ensure_ascii=False)
    called = [call_of(call_id, name, arguments) for name, call_id in calls]
    said: Message = {"role": "assistant", "content": "", "tool_calls": called}
    try:
        render = template_of(tokenizer).render
        asked, opened = render([QUESTION], tools), render([QUESTION], tools, asks=True)
        whole = render([QUESTION, said], tools)
    except RenderingError as error:
        return None, str(error)
    header = opened.removeprefix(asked)
    for begun in (header, header.partition("<think>")[0], ""):
        turn = whole.removeprefix(asked + begun)
        if turn != whole and all(name in turn for name, _ in calls):
            return (_cut(turn, tokenizer.eos_token), begun), ""
    return None, ""


def _cut(turn: str, eos: str | None) -> str:
    """Cut a turn at its end mark."""
    last = turn.rfind("2.5")
    ends = [place for end in (eos, *_ENDS) if end and (place := turn.find(end, last)) >= 0]
    return turn[: min(ends, default=len(turn))]


def _reads(
    parser: CallParser, turn: str, before: str, *, names: Sequence[str] = (_TRIED_NAME,)
) -> bool:
    try:
        calls = parser(turn, True, before)
        arguments = [
            {
                name: checked(value, {"type": _TRIED_TYPES.get(name, "null")})
                for name, value in call.arguments.items()
            }
            for call in calls
        ]
    except ValueError:
        return False
    return [c.name for c in calls] == [*names] and all(each == _TRIED for each in arguments)


def calls_in_turns(chat: ChatIds, parse: CallParser) -> ReadCalls:
    """Return a function that reads the calls in a turn; it returns none for malformed ones.

    Args:
        chat: Token ids of conversations.
        parse: Parser of the format.
    """

    def read(turn: tuple[int, ...]) -> list[Message]:
        is_ended = not chat.special_ids.isdisjoint(turn[-1:])
        try:
            ids = turn[:-1] if is_ended else turn
            calls = read_calls(parse, chat.tokenizer, ids, chat.header_ids, is_ended=is_ended)
        except MalformedCallError:
            return []
        return [
            call_of(written_id(call, calls) or f"call{number:05d}", call.name, "{}")
            for number, call in enumerate(calls)
        ]

    return read


def written_id(call: ToolCall, calls: Sequence[ToolCall]) -> str:
    """Return the id that the model gave a call; "" if there is none, or several have it."""
    is_single = [each.call_id for each in calls].count(call.call_id) == 1
    return call.call_id if is_single and _CALL_ID.fullmatch(call.call_id) else ""


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


def check_call(call: ToolCall, schemas: Mapping[str, Schema]) -> Arguments:
    """Return the arguments; cast text where the schema asks for another type.

    It checks type, nullable, enum, const, anyOf, oneOf, allOf, properties, required,
    additionalProperties, items, and the bounds of numbers, texts and lists, at every level.

    Raises:
        MalformedCallError: The tool or an argument is unknown, missing or invalid.
    """
    schema = schemas.get(call.name)
    if schema is None:
        raise MalformedCallError(f"no tool {call.name!r}: there are {', '.join(schemas) or 'none'}")
    parameters = cast("Schema", schema.get("parameters") or {})
    known = cast("Mapping[str, Schema]", parameters.get("properties") or {})
    required = cast("Sequence[str]", parameters.get("required") or ())
    unknown = [name for name in call.arguments if name not in known]
    missing = [name for name in required if name not in call.arguments]
    if unknown or missing:
        raise MalformedCallError(
            f"{call.name}: "
            + "; ".join(
                f"{what} {', '.join(map(repr, names))}"
                for what, names in (("unknown argument", unknown), ("missing argument", missing))
                if names
            )
        )
    arguments = {}
    for name, value in call.arguments.items():
        try:
            arguments[name] = checked(value, known[name])
        except ValueError as error:
            raise MalformedCallError(f"{call.name}: argument {name!r} {error}") from error
        except RecursionError:
            raise MalformedCallError(f"{call.name}: argument {name!r} is too deep") from None
    try:
        # They go to another process and into files.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        require_flat(arguments, call.name, max_depth=_MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedCallError(f"{call.name}: the arguments are no JSON: {error}") from error
    return arguments


def checked(value: object, schema: Schema) -> object:
    """Return a value, cast to what the schema asks for.

    Raises:
        ValueError: It does not match the schema; the message lacks its subject, the value's name.
    """
    if schema.get("nullable") and value is None:
        return value
    value = _of_type(value, schema)
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list) and value not in options:
        raise ValueError(f"must be one of {json.dumps(options)}: got {str(value)[:80]!r}")
    for every in cast("Sequence[Schema]", schema.get("allOf") or ()):
        value = checked(value, every)
    value = _any_of(value, cast("Sequence[Schema]", schema.get("anyOf") or schema.get("oneOf")))
    _check_bounds(value, schema)
    if isinstance(value, dict):
        return _members(value, schema)
    items = schema.get("items")
    if isinstance(value, list) and isinstance(items, Mapping):
        return [_inside(f"[{index}]", each, items) for index, each in enumerate(value)]
    return value


def _of_type(value: object, schema: Schema) -> object:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(cast("Sequence[str]", wanted or ()))
    if not names:
        return value
    if isinstance(value, str) and "string" not in names:
        text = value.strip()
        with contextlib.suppress(ValueError, RecursionError):
            value = _WORDS[text] if text in _WORDS else json.loads(text)
    if isinstance(value, float) and value.is_integer() and "number" not in names:
        value = int(value)
    for known in names:
        is_bool = isinstance(value, bool)
        if isinstance(value, _TYPES.get(known, (object,))) and is_bool <= (known == "boolean"):
            return value
    raise ValueError(f"must be {' or '.join(names)}: got {str(value)[:80]!r}")


def _any_of(value: object, options: Sequence[Schema] | None) -> object:
    reasons = []
    for option in options or ():
        try:
            return checked(value, option)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError(" or ".join(dict.fromkeys(reasons)))
    return value


def _members(value: dict[str, object], schema: Schema) -> dict[str, object]:
    known = cast("Mapping[str, Schema]", schema.get("properties") or {})
    missing = [n for n in cast("Sequence[str]", schema.get("required") or ()) if n not in value]
    if missing:
        raise ValueError(f"needs {', '.join(map(repr, missing))}")
    further = schema.get("additionalProperties", True)
    unknown = [name for name in value if name not in known]
    if unknown and further is False:
        raise ValueError(f"must not have {', '.join(map(repr, unknown))}")
    others = further if isinstance(further, Mapping) else {}
    return {
        name: _inside(f".{name}", each, known.get(name, others)) for name, each in value.items()
    }


def _inside(place: str, value: object, schema: Schema) -> object:
    try:
        return checked(value, schema)
    except ValueError as error:
        raise ValueError(f"at {place}: {error}") from None


def _check_bounds(value: object, schema: Schema) -> None:
    size: float | None = None
    names = ("minimum", "maximum")
    if isinstance(value, str):
        size, names = len(value), ("minLength", "maxLength")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and re.search(pattern, value) is None:
            raise ValueError(f"must match {pattern!r}: got {value[:80]!r}")
    elif isinstance(value, list):
        size, names = len(value), ("minItems", "maxItems")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        size = value
        _check_number(value, schema)
    for name, sign in zip(names, (1, -1), strict=True):
        bound = schema.get(name)
        if size is not None and isinstance(bound, int | float) and sign * size < sign * bound:
            raise ValueError(f"breaks {name} {bound}: got {str(value)[:80]}")


def _check_number(value: float, schema: Schema) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number: got {value}")
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(name)
        if isinstance(bound, int | float) and sign * value <= sign * bound:
            raise ValueError(f"breaks {name} {bound}: got {value}")
