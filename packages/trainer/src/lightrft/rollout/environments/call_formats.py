"""Formats in which models write tool calls, with a parser for each."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from lightrft.config.files import finite_float, refuse_constant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Arguments = dict[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it.

    Args:
        name: Name of the tool.
        arguments: Arguments by name.
        call_id: Id of the call, if the format has one.
    """

    name: str
    arguments: Arguments = field(default_factory=dict)
    call_id: str = ""


class MalformedCallError(ValueError):
    """The text opens a call but has no valid one; the model gets the message."""


class CallParser(Protocol):
    """A format of calls."""

    def __call__(self, text: str, is_ended: bool, before: str = "", /) -> list[ToolCall]:
        """Parse the calls in a turn.

        Args:
            text: Turn without its stop token.
            is_ended: It had a stop token.
            before: Text that it continues, which may open its thinking.

        Raises:
            MalformedCallError: It opens a call but has no valid one.
        """
        ...


# More than a chat template writes before a turn; it may open the model's thinking there.
_HEADER_TOKENS = 64


def read_calls(
    parse: CallParser,
    tokenizer: PreTrainedTokenizerBase,
    turn: Sequence[int],
    context: Sequence[int],
    *,
    is_ended: bool,
) -> list[ToolCall]:
    """Return the calls in a turn.

    Args:
        parse: Parser of the format.
        tokenizer: Tokenizer of the model.
        turn: Ids of the turn without its stop token.
        context: Ids before it.
        is_ended: It had a stop token.

    Raises:
        MalformedCallError: It opens a call but has no valid one.
    """
    text = tokenizer.decode(turn, skip_special_tokens=False)
    before = tokenizer.decode(context[-_HEADER_TOKENS:], skip_special_tokens=False)
    return parse(str(text), is_ended, str(before))


# Parses calls at a place of a text; returns them and the place after them.
Body = Callable[[str, int], tuple[list[ToolCall], int]]


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls between marks; thinking is skipped outside of them, and is text inside.

    Args:
        opening, closing: Marks around one body.
        body: Parser of the body.
        thinking: Marks around thinking.
        begins: Further marks, beside `MARKS`, that end the text before calls.
    """

    opening: str
    closing: str
    body: Body
    thinking: tuple[str, str] = ("<think>", "</think>")
    begins: tuple[str, ...] = ()

    def __call__(self, text: str, is_ended: bool, before: str = "", /) -> list[ToolCall]:
        """Parse the calls between the marks."""
        thinks, known = self.thinking
        place, calls = 0, list[ToolCall]()
        if before.rstrip().endswith(thinks):  # some templates open the thinking
            place = _after(text, known, 0)
        while 0 <= place < len(text):
            start, thought = text.find(self.opening, place), text.find(thinks, place)
            if start < 0:
                break
            if 0 <= thought < start:
                place = _after(text, known, thought)
                continue
            parsed, place = self.body(text, start + len(self.opening))
            calls += parsed
            place = _past_spaces(text, place)
            if text.startswith(self.closing, place):
                place += len(self.closing)
            elif place < len(text) or not is_ended:
                raise MalformedCallError(f"a {self.opening} is not closed by {self.closing}")
        return calls


_SPACES = re.compile(r"\s*")


def _past_spaces(text: str, place: int) -> int:
    match = _SPACES.match(text, place)
    return place if match is None else match.end()


def _after(text: str, mark: str, start: int) -> int:
    """Return the place after a mark; -1 without it: thinking that never ends is all thinking."""
    place = text.find(mark, start)
    return -1 if place < 0 else place + len(mark)


_THOUGHTS = re.compile(r"\A(?:\s*<think>(?:.*?</think>|.*))*\s*", re.DOTALL)


def spoken(text: str, before: str) -> str:
    """Return the text behind the thinking with which it begins."""
    if before.rstrip().endswith("<think>"):
        text = f"<think>{text}"
    return _THOUGHTS.sub("", text)


def from_value(value: object, names: Sequence[str]) -> ToolCall:
    """Convert an object to a call: its name, and its arguments under the first name that exists.

    Raises:
        MalformedCallError: It is no call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise MalformedCallError('a call needs "name" and "arguments"')
    arguments: object = next((value[name] for name in names if value.get(name) is not None), {})
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the arguments of {value['name']} must be an object")
    call_id = value.get("id")
    return ToolCall(value["name"], arguments, call_id if isinstance(call_id, str) else "")


_JSON = json.JSONDecoder(parse_constant=refuse_constant, parse_float=finite_float)


def decode_json(text: str, place: int) -> tuple[object, int]:
    """Decode a JSON value at a place; return the place after it, too."""
    try:
        return _JSON.raw_decode(text, _past_spaces(text, place))
    except json.JSONDecodeError as error:
        said = f"{error.msg} after {text[place : error.pos][-40:].strip()!r}"
        raise MalformedCallError(f"a call is no JSON object: {said}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"a call is no JSON object: {error}") from error


def parse_json_body(text: str, place: int) -> tuple[list[ToolCall], int]:
    """Read one call that is a JSON object."""
    value, end = decode_json(text, place)
    return [from_value(value, ("arguments", "parameters"))], end


def named_json(pattern: str, fence: str = "") -> Body:
    """Return a parser of a name, perhaps with an id, followed by its arguments as JSON."""
    head, end_of_fence = re.compile(pattern, re.DOTALL), re.compile(rf"\s*{fence}")

    def body(text: str, place: int) -> tuple[list[ToolCall], int]:
        match = head.match(text, place)
        if match is None:
            raise MalformedCallError("a call needs a name and its arguments as JSON")
        value, end = decode_json(text, match.end())
        if not isinstance(value, dict):
            raise MalformedCallError(f"the arguments of {match['name']} must be an object")
        closed = end_of_fence.match(text, end)
        call_id = match.groupdict().get("id") or ""
        call = ToolCall(match["name"].strip(), value, call_id)
        return [call], closed.end() if closed else end

    return body


def _text_pairs(head: str, pair: str, closing: str, needs: tuple[str, str]) -> Body:
    """Return a parser of a name followed by its arguments as pairs of a name and a text.

    Args:
        head, pair: Patterns of the name, and of an argument: name, perhaps a mark of JSON, value.
        closing: Mark behind the arguments.
        needs: Errors of a call without a name, and of one whose arguments or end are wrong.
    """
    first, each = re.compile(head), re.compile(pair, re.DOTALL)

    def body(text: str, place: int) -> tuple[list[ToolCall], int]:
        name = first.match(text, place)
        if name is None:
            raise MalformedCallError(needs[0])
        arguments: Arguments = {}
        place = name.end()
        while match := each.match(text, place):
            *kind, value = match.groups()[1:]
            arguments[match[1].strip()] = value
            with suppress(ValueError, RecursionError):
                if any(kind):  # the format says that it is JSON
                    arguments[match[1].strip()] = _JSON.decode(value)
            place = match.end()
        if not text.startswith(closing, place):
            raise MalformedCallError(f"the call of {name[1]} {needs[1]}")
        return [ToolCall(name[1].strip(), arguments)], place + len(closing)

    return body


_xml_body = _text_pairs(
    r"\s*<function=([^>\n]+)>\s*",
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)",
    "</function>",
    (
        "a call needs <function=NAME> and </function>",
        "needs <parameter=NAME>, a value and </parameter> for each argument, and then </function>",
    ),
)
_glm_body = _text_pairs(
    r"\s*([\w.-]+)\s*",
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>|$)",
    "",
    ("a call begins with the name of a tool", ""),
)


def _python_body(text: str, place: int) -> tuple[list[ToolCall], int]:
    end = text.find("<|tool_call_end|>", place)
    end = len(text) if end < 0 else end
    return _python_calls(text[place:end].strip()), end


def _python_calls(expression: str) -> list[ToolCall]:
    try:
        with suppress(SyntaxError):  # some templates leave newlines in quotes, as LFM2.5's
            ast.parse(one_line := expression.replace("\n", "\\n"), mode="eval")
            expression = one_line
        items = cast("ast.List", ast.parse(expression, mode="eval").body).elts
        return list(map(_python_call, items))
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"calls must be a list of f(name=literal): {error}") from error


def _python_call(item: ast.expr) -> ToolCall:
    match item:
        case ast.Call(ast.Name(name), [], keywords) if all(k.arg for k in keywords):
            return ToolCall(name, {str(k.arg): _literal(k.value) for k in keywords})
    raise ValueError("positional arguments are not named")


class _JsonWords(ast.NodeTransformer):
    """Conversion of JSON's words to Python's, since some templates write them into Python."""

    _words: ClassVar[dict[str, object]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._words[node.id]) if node.id in self._words else node  # type: ignore[arg-type]


def _literal(value: ast.expr) -> object:
    return ast.literal_eval(cast("ast.expr", _JsonWords().visit(value)))


_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_QUOTE = '<|"|>'
_GEMMA_PART = re.compile(
    r'\s*<\|"\|>(?P<text>.*?)<\|"\|>|\s*"(?:[^"\\]|\\.)*"(?=\s*[,}\]])|'
    r"\s*(?P<key>[^\s:{}\[\],]+)\s*:|(?P<last>(?<![{\[,]),(?=\s*[}\]]))|"
    r"(?P<word>[^,:\[\]{}]+)|.",
    re.DOTALL,
)


def _gemma_body(text: str, place: int) -> tuple[list[ToolCall], int]:
    """Read Gemma's notation as JSON: keys have no quotation marks, and texts its own."""
    head = _GEMMA_CALL.match(text, place)
    if head is None:
        raise MalformedCallError("a call needs call:NAME{...}")
    pieces, depth, end = list[str](), 0, head.end()
    for part in _GEMMA_PART.finditer(text, end):
        piece, end = part[0], part.end()
        if part["text"] is not None:
            piece = json.dumps(part["text"])
        elif part["key"] is not None:
            piece = f"{json.dumps(part['key'].replace(_QUOTE, ''))}:"
        elif part["word"] is not None:  # some of the templates write null as Python does
            piece = "null" if piece.strip() == "None" else piece
        elif part["last"] is not None:  # JSON has no comma before the end
            piece = ""
        else:
            depth += (piece in "{[") - (piece in "}]")
        pieces.append(piece)
        if depth == 0:
            break
    value, _ = decode_json("".join(pieces), 0)
    return [ToolCall(head[1], cast("Arguments", value))], end


# What stands before calls; Llama 4 marks a text there.
_LLAMA_MARKS = re.compile(
    r"\A(?:<\|python_start\|>.*?<\|python_end\|>|<\|python_tag\|>|[;\s])*", re.DOTALL
)


def llama_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """Parse `{"name": ..., "parameters": {...}}`, several joined by `;` (Llama 3) or not (4)."""
    del is_ended
    said = _LLAMA_MARKS.sub("", spoken(text, before))
    if not re.match(r'\{\s*"(name|type)"', said):
        return []
    calls = []
    while said:
        value, end = decode_json(said, 0)
        calls.append(from_value(value, ("parameters", "arguments")))
        said = _LLAMA_MARKS.sub("", said[end:])
    return calls


def pythonic_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """Parse `[f(x=1), g(s='a')]`, literals only (Llama 4, Olmo)."""
    del is_ended
    said = spoken(text, before).strip()
    return _python_calls(said) if re.match(r"\[\s*[A-Za-z_][\w.]*\(", said) else []


def xml_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """Parse `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`."""
    calls = _XML(text, is_ended, before)
    # Models of this family may leave out the first mark.
    return calls or Marked("<function=", "", lambda t, p: _xml_body(t, p - len("<function=")))(
        text, is_ended, before
    )


def invoke_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """Parse `<invoke name="f"><parameter name="x">1</parameter></invoke>`.

    The family writes a prefix of its own before both names (MiniMax none, DeepSeek `DSML`).
    """
    # Texts in arguments may hold calls with another prefix.
    for prefix in dict.fromkeys(_INVOKE.findall(spoken(text, before))):
        if calls := _invokes(prefix)(text, is_ended, before):
            return calls
    return []


_INVOKE = re.compile(r'<([^\s<>/"]*)invoke name="')


@lru_cache(maxsize=16)
def _invokes(prefix: str) -> CallParser:
    name = re.escape(prefix)
    body = _text_pairs(
        r'([^"\n]+)">\s*',
        rf'<{name}parameter name="([^"\n]+)"( string="false")?[^>\n]*>(.*?)</{name}parameter>\s*'
        rf"(?=<{name}parameter name=|</{name}invoke>)",
        "",
        ('a call needs <invoke name="NAME">', ""),
    )
    return Marked(f'<{prefix}invoke name="', f"</{prefix}invoke>", body)


_mistral_call = named_json(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{)"
)


def _mistral_body(text: str, place: int) -> tuple[list[ToolCall], int]:
    """Read `[{"name": ..., "arguments": {...}}]` or `f{...}`."""
    if not text.startswith("[", _past_spaces(text, place)):
        return _mistral_call(text, place)
    value, end = decode_json(text, place)
    return [from_value(each, ("arguments",)) for each in cast("list[object]", value)], end


def harmony_calls(text: str, is_ended: bool, before: str = "") -> list[ToolCall]:
    """Parse `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`.

    This is gpt-oss's format; text of other channels is no call.
    """
    del is_ended
    calls, place = list[ToolCall](), 0
    text = before[before.rfind("<|start|>") :] + text if before else text
    while header := _HARMONY.search(text, place):
        value, place = decode_json(text, header.end())
        if not isinstance(value, dict):
            raise MalformedCallError(f"the arguments of {header[1]} must be an object")
        calls.append(ToolCall(header[1], value))
    return calls


_HARMONY = re.compile(
    r"to=functions\.([\w.-]+)[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>"
)
_DEEPSEEK = "\uff5ctool\u2581{}\uff5c"
_CALLS_BEGIN = f"<{_DEEPSEEK.format(f'calls{chr(0x2581)}begin')}>"
_CALL_BEGIN = f"<{_DEEPSEEK.format(f'call{chr(0x2581)}begin')}>"
_CALL_END = f"<{_DEEPSEEK.format(f'call{chr(0x2581)}end')}>"
_SEP = f"<{_DEEPSEEK.format('sep')}>"
_XML = Marked("<tool_call>", "</tool_call>", _xml_body)
hermes_calls = Marked("<tool_call>", "</tool_call>", parse_json_body)
glm_calls = Marked("<tool_call>", "</tool_call>", _glm_body)
deepseek_calls = Marked(
    _CALL_BEGIN,
    _CALL_END,
    named_json(rf"(?:function{_SEP})?(?P<name>[\w.-]+)(?:{_SEP}|\s*```json)\s*", "(?:```)?"),
)
kimi_calls = Marked(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    named_json(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
    ),
)
lfm_calls = Marked("<|tool_call_start|>", "<|tool_call_end|>", _python_body)
gemma_calls = Marked(
    "<|tool_call>", "<tool_call|>", _gemma_body, ("<|channel>thought", "<channel|>")
)
mistral_calls = Marked("[TOOL_CALLS]", "", _mistral_body)

# In the order in which a chat template is tested with them.
PARSERS: Mapping[str, CallParser] = {
    "hermes": hermes_calls,
    "xml": xml_calls,
    "glm": glm_calls,
    "deepseek": deepseek_calls,
    "kimi": kimi_calls,
    "invoke": invoke_calls,
    "lfm": lfm_calls,
    "gemma": gemma_calls,
    "harmony": harmony_calls,
    "mistral": mistral_calls,
    "llama": llama_calls,
    "pythonic": pythonic_calls,
}
# Where calls begin in a text.
MARKS = (
    *("<tool_call>", "<|python_tag|>", "<function=", _CALLS_BEGIN, _CALL_BEGIN),
    *("<|tool_call_start|>", "<|tool_call>", "[TOOL_CALLS]"),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<minimax:tool_call>",
        "<\uff5cDSML\uff5c",
    ),
)
