"""Tool calls in turns: a parser a format, and the check against tools' schemas."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from lightrft.config import ConfigError
from lightrft.kernels.names import first_line

Arguments = dict[str, object]
Schema = Mapping[str, object]
# Takes the turns of environments without calls, and the actions of OpenEnv's.
TURN_TOOL = "step"
# Of the rows' environments, where `--environment` names a dict of them; TRL's word.
ENVIRONMENT_COLUMN = "environment"
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it.

    Args:
        name: Of the tool.
        arguments: By name.
    """

    name: str
    arguments: Arguments = field(default_factory=dict)


class MalformedCallError(ValueError):
    """The text opens a call and holds no valid one; the model gets the message."""


class ParsingTokenizer(Protocol):
    """A tokenizer that may know how its model writes calls."""

    chat_template: str | None


class Parser(Protocol):
    """A format of calls."""

    def __call__(self, text: str, is_ended: bool, before: str = "", /) -> list[ToolCall]:
        """The calls in a turn.

        Args:
            text: Without its stop token.
            is_ended: It has one.
            before: The text that it continues, which may have begun to think for it.

        Raises:
            MalformedCallError: It opens a call, and there is no valid one.
        """
        ...


def hermes_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeatable (Hermes, Qwen)."""
    pieces = _spoken(text, before).split("<tool_call>")[1:]
    calls = []
    for index, piece in enumerate(pieces):
        body, closing, _ = piece.partition("</tool_call>")
        is_last = index + 1 == len(pieces)
        if not closing and not (is_last and is_ended):
            raise MalformedCallError("a <tool_call> is not closed by </tool_call>")
        calls.append(_from_json(body, ("arguments",)))
    return calls


def llama_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """`{"name": ..., "parameters": {...}}`, several joined by `;` (Llama 3)."""
    del is_ended
    spoken = _spoken(text, before).replace("<|python_tag|>", "").strip()
    if not re.match(r'\{\s*"(name|type)"', spoken):
        return []
    decoder, calls = json.JSONDecoder(), []
    while spoken:
        try:
            value, end = decoder.raw_decode(spoken)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError(f"a call is no JSON object: {error}") from error
        calls.append(_from_value(value, ("parameters", "arguments")))
        spoken = spoken[end:].lstrip("; \n")
    return calls


def pythonic_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """`[f(x=1), g(s='a')]`, literals only (Llama 4, Olmo)."""
    del is_ended
    spoken = _spoken(text, before).strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", spoken):
        return []
    try:
        expression = ast.parse(spoken, mode="eval").body
        items = cast("ast.List", expression).elts
        return list(map(_pythonic_call, items))
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"calls must be a list of f(name=literal): {error}") from error


def whole_turn(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """All that is said, for environments that answer turns instead of calls."""
    del is_ended, before
    return [ToolCall(TURN_TOOL, {"action": text})]


PARSERS: Mapping[str, Parser] = {
    "hermes": hermes_calls,
    "llama": llama_calls,
    "pythonic": pythonic_calls,
}


def choose_parser(name: str, tokenizer: ParsingTokenizer, schemas: Sequence[Schema]) -> Parser:
    """The parser of an option.

    Args:
        name: "auto" takes the tokenizer's own response template where it has one, else what its
            chat template writes; or a name in `PARSERS`.
        tokenizer: Of the model.
        schemas: Of the tools.

    Raises:
        ConfigError: The format cannot be told from the tokenizer.
    """
    if name != "auto":
        return PARSERS[name]
    if vars(tokenizer).get("response_template") is not None:
        return _template_parser(tokenizer, schemas)
    template = tokenizer.chat_template or ""
    if "<tool_call>" in template:
        return hermes_calls
    if "python_tag" in template or '"parameters": ' in template:
        return llama_calls
    raise ConfigError(
        "tool_parser auto: the tokenizer has no response template, and its chat template writes no "
        f"known format of calls; give --tool_parser: {', '.join(PARSERS)}"
    )


def check_call(call: ToolCall, schemas: Mapping[str, Schema]) -> Arguments:
    """The arguments, numbers and booleans cast from text where the schema asks for them.

    Raises:
        MalformedCallError: The tool or an argument is unknown, missing or of a wrong type.
    """
    schema = schemas.get(call.name)
    if schema is None:
        raise MalformedCallError(f"no tool {call.name!r}: there are {', '.join(schemas) or 'none'}")
    parameters = cast("Mapping[str, object]", schema.get("parameters") or {})
    known = cast("Mapping[str, Mapping[str, object]]", parameters.get("properties") or {})
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
    found = {n: _cast(call.name, n, value, known[n]) for n, value in call.arguments.items()}
    try:
        # They go to another process and into files.
        json.dumps(found, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedCallError(f"{call.name}: the arguments are no JSON: {error}") from error
    return found


def as_error(text: str) -> str:
    """An answer that says what was wrong."""
    answer = json.dumps({"error": text}, ensure_ascii=False)
    return answer.encode("utf-8", "replace").decode()  # halves of surrogate pairs


def _cast(tool: str, name: str, value: object, schema: Mapping[str, object]) -> object:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(cast("Sequence[str]", wanted or ()))
    if not names or (schema.get("nullable") and value is None):
        return value
    if isinstance(value, str) and "string" not in names:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    for known in names:
        is_bool = isinstance(value, bool)
        if isinstance(value, _TYPES.get(known, (object,))) and is_bool <= (known == "boolean"):
            return value
    raise MalformedCallError(
        f"{tool}: argument {name!r} must be {' or '.join(names)}: got {str(value)[:80]!r}"
    )


def _spoken(text: str, before: str) -> str:
    """Text outside of thinking; thinking that never ends is all thinking."""
    if before.rstrip().endswith("<think>"):  # some templates open it
        text = f"<think>{text}"
    return _THINKING.sub("", text).partition("<think>")[0]


def _from_json(body: str, names: Sequence[str]) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"a call is no JSON object: {error}") from error
    return _from_value(value, names)


def _from_value(value: object, names: Sequence[str]) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise MalformedCallError('a call needs "name" and "arguments"')
    arguments: object = next((value[name] for name in names if name in value), {})
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the arguments of {value['name']} must be an object")
    return ToolCall(value["name"], arguments)


def _pythonic_call(item: ast.expr) -> ToolCall:
    match item:
        case ast.Call(ast.Name(name), [], keywords) if all(k.arg for k in keywords):
            return ToolCall(name, {str(k.arg): ast.literal_eval(k.value) for k in keywords})
    raise ValueError("positional arguments are not named")


def _template_parser(tokenizer: object, schemas: Sequence[Schema]) -> Parser:
    tools = list(schemas)

    def parse(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
        del is_ended
        try:
            message = tokenizer.parse_response(text, prefix=before, tools=tools)  # type: ignore[attr-defined]
            calls = [call["function"] for call in message.get("tool_calls") or ()]
        except Exception as error:  # of a program of the model's author, on what a model says
            first = first_line(error)
            raise MalformedCallError(f"the calls cannot be read: {first}") from error
        return [_from_value(call, ("arguments",)) for call in calls]

    return parse
