"""Messages of rows in one form for all stages and commands, whatever form they come in.

The form is OpenAI's: `role`, `content` (a text, or parts with media), `tool_calls` with arguments
as JSON text, `tool_call_id`; and `reasoning_content` for thinking beside the content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from typing import cast

from lightrft.config.files import finite_float, refuse_constant
from lightrft.datasets.files import Row
from lightrft.datasets.types import DataError

Message = dict[str, object]
# Types of parts that are texts; other parts (like thinking) are not spoken.
TEXT_TYPES = ("text", "input_text", "output_text")
ASSISTANT, SYSTEM = "assistant", "system"
CALLS, REASONING = "tool_calls", "reasoning_content"
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOLS_COLUMN = "tools"
# Columns in which prompts may be, the likeliest first.
INPUT_KEYS = (
    "input",
    "prompt",
    "question",
    "problem",
    "instruction",
    "query",
    "messages",
    "conversations",
)
# Columns whose content belongs into a prompt; others are for rewards and environments.
OF_PROMPTS = frozenset({*INPUT_KEYS, *SYSTEM_COLUMNS, TOOLS_COLUMN, "history"})
ANSWER_KEYS = ("completion", "output", "response", "answer")
# Names for thinking beside the content.
REASONING_KEYS = (REASONING, "reasoning", "thinking")
# Names of roles in ShareGPT and other frameworks.
SPEAKERS = {
    "human": "user",
    "gpt": ASSISTANT,
    "user": "user",
    ASSISTANT: ASSISTANT,
    SYSTEM: SYSTEM,
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
}
_CALLERS = ("function_call", "tool_call")
# Keys of a message that tell whether it is trained.
_MARKS = ("weight", "train", "trainable", "training", "loss")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a row.

    Args:
        messages: Messages in OpenAI's form.
        tools: Schemas of the tools that the model sees.
        untrained: Places of the assistant's messages that the row excludes from training.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    untrained: frozenset[int] = frozenset()

    def __add__(self, other: Conversation) -> Conversation:
        """Return both, one after the other."""
        return Conversation(
            (*self.messages, *other.messages),
            self.tools or other.tools,
            self.untrained | {place + len(self.messages) for place in other.untrained},
        )


def read_messages(columns: Mapping[str, object], name: str, *, speaker: str = "") -> Conversation:
    """Return the messages of a column, without the rest of the row.

    Args:
        columns: Columns of a row.
        name: Column with messages.
        speaker: Role of a text in place of messages; "" accepts none.

    Raises:
        DataError: The column holds something else.
    """
    content = columns[name]
    if isinstance(content, Conversation):
        return content
    if isinstance(content, str) and content and speaker:
        return Conversation(({"role": speaker, "content": content},))
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        raise DataError(
            f"column {name!r} must hold {'a string or ' if speaker else ''}a list of messages: got "
            f"{type(content).__name__} "
            f"{str(content)[:80]!r}"
        )
    places = (f"message {place} of column {name!r}" for place in range(1, 1 + len(content)))
    messages, trained = zip(*map(_message, content, places), strict=True)
    untrained = frozenset(place for place, is_trained in enumerate(trained) if not is_trained)
    return Conversation(messages, (), untrained)


def read_conversation(
    columns: Mapping[str, object], name: str, *, speaker: str = ""
) -> Conversation:
    """Return the messages of a column with the row's system message and tools.

    Raises:
        DataError: As `read_messages`, or the row has two system messages.
    """
    if isinstance(columns[name], Conversation):
        return read_messages(columns, name)
    return in_context(columns, read_messages(columns, name, speaker=speaker))


def in_context(columns: Mapping[str, object], conversation: Conversation) -> Conversation:
    """Return a conversation with the row's column `system` before it and its column `tools`.

    Raises:
        DataError: A column is no text or no list, or the row has two system messages.
    """
    conversation = replace(conversation, tools=read_tools(columns))
    text, first = system_of(columns), conversation.messages[0]
    if text is None or (first["role"], first["content"]) == (SYSTEM, text):
        return conversation
    if first["role"] == SYSTEM:
        raise DataError(
            "the row has a system message and a column of another one: leave one of them out"
        )
    return Conversation(({"role": SYSTEM, "content": text},)) + conversation


def system_of(columns: Mapping[str, object]) -> str | None:
    """Return the system message in a column of the row, if there is one.

    Raises:
        DataError: The column is no text.
    """
    for name in SYSTEM_COLUMNS:
        text = columns.get(name)
        if text is not None and not isinstance(text, str):
            raise DataError(f"column {name!r} must hold a text: got {str(text)[:80]!r}")
        if text:
            return text
    return None


def read_tools(columns: Mapping[str, object]) -> tuple[Message, ...]:
    """Return the column `tools`, a list or its JSON text, in OpenAI's form.

    Raises:
        DataError: The column holds something else.
    """
    tools = columns.get(TOOLS_COLUMN) or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or []
        except (ValueError, RecursionError) as err:
            raise DataError(f"column 'tools' is no JSON: {err}") from err
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise DataError(f"column 'tools' must hold a list of objects: got {str(tools)[:80]!r}")
    return tuple(
        dict(each)
        if "function" in each or "name" not in each
        else {"type": "function", "function": dict(each)}
        for each in tools
    )


def require_asked(messages: Sequence[Mapping[str, object]]) -> None:
    """Raise a DataError if a prompt ends with an answer, which would be answered again."""
    if messages and messages[-1]["role"] == ASSISTANT:
        raise DataError(
            f"the prompt ends with the assistant's message {str(messages[-1]['content'])[:60]!r}, "
            "and an answer that is begun is not continued: end prompts with the user's message, "
            "put the answer into a column of its own, or train on it with lightrft sft"
        )


def is_alpaca(columns: Mapping[str, object]) -> bool:
    """Return whether a row has Alpaca's columns: an instruction, its input, and the output."""
    return "instruction" in columns and "output" in columns


def alpaca_prompt(columns: Mapping[str, object]) -> str:
    """Return the instruction and input of a row of Alpaca, an empty line between them.

    Raises:
        DataError: One is no text.
    """
    texts = [columns["instruction"], columns.get("input") or ""]
    if not all(isinstance(each, str) for each in texts) or not texts[0]:
        raise DataError(f"instruction and input must be texts: got {str(texts)[:80]!r}")
    return "\n\n".join(str(each) for each in texts if str(each).strip())


def alpaca_turns(columns: Mapping[str, object]) -> Conversation:
    """Return a row of Alpaca as turns: earlier ones (`history`), the instruction, the output.

    Raises:
        DataError: A column is no text, or the history is not a list of pairs.
    """
    output, history = columns["output"], columns.get("history") or []
    pairs = history if isinstance(history, list) else [history]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError(f"column 'history' must hold pairs of texts: got {str(history)[:80]!r}")
    if not isinstance(output, str) or not output:
        raise DataError(f"column 'output' must hold a text: got {str(output)[:80]!r}")
    messages = [
        {"role": role, "content": text}
        for pair in [*pairs, [alpaca_prompt(columns), output]]
        for role, text in zip(("user", ASSISTANT), pair, strict=True)
    ]
    return in_context(columns, read_messages({"history": messages}, "history"))


def renaming(columns: Container[str]) -> str:
    """Return a hint to rename prompt and answer columns of other layouts; "" if not needed."""
    prompt, answer = (
        next((name for name in keys if name in columns), None) for keys in (INPUT_KEYS, ANSWER_KEYS)
    )
    names = {prompt: "prompt", answer: "completion"}
    pairs = ", ".join(f'"{old}": "{new}"' for old, new in names.items() if old != new)
    if prompt is None or answer is None or not pairs:
        return ""
    return f"; {prompt} and {answer} look like them: rename_columns({{{pairs}}}) of datasets"


def named_columns(columns: Mapping[str, object]) -> str:
    """Return the names of columns, for an error."""
    return ", ".join(f"{n!r}{' (null)' * (v is None)}" for n, v in columns.items()) or "none"


def joined(content: object) -> str:
    """Return a content as one text: templates of text models would print lists.

    Raises:
        DataError: A part is no text.
    """
    if isinstance(content, str):
        return content
    parts = [
        (each.get("text") if each.get("type", "text") in TEXT_TYPES else None)
        if isinstance(each, Mapping)
        else each
        for each in cast("Sequence[object]", content)
    ]
    if not all(isinstance(part, str) for part in parts):
        raise DataError("a message has a part that is no text: leave it out")
    return "".join(map(str, parts))


def with_texts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with contents as texts; see `joined`."""
    return [{**message, "content": joined(message["content"])} for message in messages]


def with_objects(message: Message) -> Message:
    """Return a message with call arguments as objects, as most chat templates take them.

    Raises:
        ValueError: The arguments are no JSON.
    """
    calls = []
    for call in cast("Sequence[Message]", message.get(CALLS) or ()):
        function = dict(cast("Message", call["function"]))
        function["arguments"] = _arguments(str(function["arguments"]))
        calls.append({**call, "function": function})
    return {**message, CALLS: calls} if calls else message


def _message(message: object, place: str) -> tuple[Message, bool]:
    """Return a message in OpenAI's form, and whether it may be trained."""
    raw = message if isinstance(message, Mapping) else {}
    # Parquet fills absent fields with null.
    fields = {str(name): value for name, value in raw.items() if not _is_absent(value)}
    if "from" in fields and "role" not in fields:
        fields = {"role": fields.pop("from"), "content": fields.pop("value", None), **fields}
        if fields["role"] not in SPEAKERS:
            raise DataError(
                f"{place} must be an object with from ({', '.join(SPEAKERS)}) and a text as "
                f"value: got {str(raw)[:80]!r}"
            )
    speaker = fields.get("role")
    if isinstance(speaker, str):
        fields["role"] = SPEAKERS.get(speaker, speaker)
        _take_calls(fields, speaker, place)
        _take_reasoning(fields)
    says_more = CALLS in fields or REASONING in fields
    content = fields.get("content")
    fields["content"] = "" if content is None and says_more else _content(content)
    if not isinstance(speaker, str) or fields["content"] is None:
        raise DataError(
            f"{place} must be an object with role and content, a text or parts: got "
            f"{str(raw)[:80]!r}"
        )
    return fields, _take_marks(fields, place)


def _content(content: object) -> object:
    """Return a text, or parts without the nulls of Parquet; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return None
    return [
        {name: value for name, value in part.items() if value is not None}
        if isinstance(part, Mapping)
        else part
        for part in content
    ]


def _take_calls(fields: Message, speaker: str, place: str) -> None:
    """Put the calls of a message under `tool_calls`, whatever form they have."""
    calls: object = fields.pop(CALLS, None)
    if speaker in _CALLERS:
        calls, fields["content"] = fields.get("content"), ""
    elif "function_call" in fields:
        calls = [fields.pop("function_call")]
    if calls is None:
        return
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        calls = [calls] if isinstance(calls, Mapping) else calls
        if not isinstance(calls, list | tuple):
            raise ValueError("expected a list of objects")
        if calls:
            fields[CALLS] = [_call(each) for each in calls]
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: a date of Parquet
        raise DataError(
            f"{place} has calls that cannot be read ({error}): expected name, and arguments as an "
            f"object or as JSON: got {str(calls)[:80]!r}"
        ) from error


def _call(call: object) -> Message:
    """Return a call with its arguments as JSON; ValueError or TypeError if malformed."""
    rest = {name: value for name, value in _mapping(call).items() if value is not None}
    function = rest.pop("function", None)
    if function is None:  # name and arguments stand in the call itself
        function = {name: rest.pop(name, None) for name in ("name", "arguments")}
        rest["type"] = "function"
    fields = _mapping(function)
    if not isinstance(fields.get("name"), str):
        raise ValueError("a call has no name")
    arguments = fields.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**rest, "function": {**fields, "arguments": text if _arguments(text) else "{}"}}


def _arguments(text: str) -> Mapping[str, object]:
    """Return the object that arguments encode, {} for nothing; raise a ValueError otherwise."""
    try:
        value = json.loads(text or "null", parse_constant=refuse_constant, parse_float=finite_float)
        return _mapping(value or {})
    except RecursionError as error:
        raise ValueError("they are nested too deep") from error


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{str(value)[:40]!r} is no object")
    return value


def _take_reasoning(fields: Message) -> None:
    """Put thinking beside the content under one name."""
    for name in REASONING_KEYS:
        if isinstance(fields.get(name), str) and (text := fields.pop(name)):
            fields.setdefault(REASONING, text)


def _take_marks(fields: Message, place: str) -> bool:
    """Take the marks of training out of a message; return whether it may be trained."""
    is_trained = True
    for name in [name for name in _MARKS if name in fields]:
        value = fields.pop(name)
        if value not in (0, 1):
            raise DataError(f"{place}: {name} must be 0 or 1: got {str(value)[:40]!r}")
        if value and fields["role"] != ASSISTANT:
            raise DataError(
                f"{place}: {name} is {value}, and only an assistant's turns are trained: leave it "
                "out, or give --train_on all for all messages"
            )
        is_trained &= bool(value)
    return is_trained


def _is_absent(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass(slots=True)
class ReadRecord:
    """Record of the columns and message keys of some rows that nothing reads.

    Args:
        columns: Names of all columns, in their order.
        read: Names that were read.
        keys: Keys of messages that the chat template does not write.
        remarks: Remarks on earlier rows that were left out.
    """

    columns: dict[str, None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    keys: dict[str, None] = field(default_factory=dict)
    remarks: dict[str, None] = field(default_factory=dict)

    def watch(self, row: Row) -> Row:
        """Return the row with columns whose reading is recorded."""
        self.columns |= dict.fromkeys(row.columns)
        self.remarks |= dict.fromkeys(filter(None, (row.remark,)))
        return replace(row, columns=WatchedColumns(row.columns, self))

    def line(self, among: Container[str] | None = None) -> str:
        """Return the unread names, in a few words; "" if all were read.

        Args:
            among: Columns that count; None counts all.
        """
        columns = [
            name
            for name in self.columns
            if name not in self.read and (among is None or name in among)
        ]
        parts = []
        where = "columns" if among is None else "columns that are in no prompt:"
        for what, names in ((where, columns), ("keys of messages", [*self.keys])):
            if names:
                more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
                parts.append(f"{what} {', '.join(names[:_MAX_NAMES])}{more}")
        return f"not read: {'; '.join(parts)}" if parts else ""

    def added_to(self, summary: str, path: str) -> str:
        """Return a summary of rows with lines on what was left out or not read."""
        lines = filter(None, (*self.remarks, self.line()))
        return "\n".join((summary, *(f"{path}: {line}" for line in lines)))


_MAX_NAMES = 12


class WatchedColumns(Mapping[str, object]):
    """Columns of a row that record which of them are read; iteration records none.

    Args:
        columns: Columns of a row.
        record: Record of the rows.
    """

    def __init__(self, columns: Mapping[str, object], record: ReadRecord) -> None:
        self._columns, self.record = columns, record

    def __getitem__(self, name: str) -> object:
        self.record.read.add(name)
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def items(self) -> ItemsView[str, object]:
        """Return the names and values, unrecorded."""
        return self._columns.items()

    def values(self) -> ValuesView[object]:
        """Return the values, unrecorded."""
        return self._columns.values()


def like(columns: Mapping[str, object], others: Mapping[str, object]) -> Mapping[str, object]:
    """Return the columns, watched if the others are."""
    return WatchedColumns(columns, others.record) if isinstance(others, WatchedColumns) else columns


def note_unread_keys(columns: Mapping[str, object], keys: Sequence[str]) -> None:
    """Record keys of messages that the chat template does not write."""
    if keys and isinstance(columns, WatchedColumns):
        columns.record.keys |= dict.fromkeys(keys)
