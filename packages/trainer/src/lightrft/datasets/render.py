"""Text of a prompt from the columns of a row."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from lightrft.config import PromptDataOptions, TeacherOptions, TrainConfig
from lightrft.config.parts.data import PROMPT_SLOT, PromptOptions, TemplateOptions
from lightrft.datasets.chat_template import template_of
from lightrft.datasets.files import Row
from lightrft.datasets.messages import (
    INPUT_KEYS,
    SYSTEM,
    Conversation,
    Message,
    alpaca_prompt,
    in_context,
    is_alpaca,
    named_columns,
    note_unread_keys,
    read_conversation,
    read_tools,
    require_asked,
)
from lightrft.datasets.text_ids import prompt_ids
from lightrft.datasets.types import DataError
from lightrft.engines.text import Tokenizer

# Some million tokens, more than any model takes.
MAX_PROMPT_CHARACTERS = 2**24


@runtime_checkable
class RowTokenizer(Tokenizer, Protocol):
    """Tokenizer that shows rows different tools."""

    @property
    def shows_row_tools(self) -> bool:
        """Return whether it shows the tools of a row, not those of its environment."""
        ...

    def for_row(self, columns: Mapping[str, object]) -> Tokenizer:
        """Return the tokenizer of one row; raise a DataError if the row names none."""
        ...


def check_tokenizer(tokenizer: Tokenizer, config: TemplateOptions) -> None:
    """Raise a DataError if the chat template is requested but the tokenizer has none."""
    if config.apply_chat_template and not tokenizer.chat_template:
        raise DataError(
            "--apply_chat_template: the tokenizer has no chat template; use an instruct model, put "
            "a chat_template into its tokenizer_config.json, or use --input_template instead"
        )


def render(
    row: Row,
    tokenizer: Tokenizer,
    config: PromptDataOptions,
    content: str | Sequence[Message] | None = None,
) -> str:
    """Return the text of the prompt of one row.

    Args:
        row: Row of the prompt.
        tokenizer: Tokenizer with the chat template.
        config: Options with the column and its rendering.
        content: Content to use instead of the column's, see `messages_of`.

    Raises:
        DataError: The column is missing or neither a non-empty string nor a list of messages, or
            messages come without the chat template.
    """
    content = messages_of(row, config) if content is None else content
    text = content if isinstance(content, str) else render_chat(row, tokenizer, content)
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise DataError(
            f"{row.location}: the prompt has {len(text)} characters: expected at most "
            f"{MAX_PROMPT_CHARACTERS}; look for a column, or a chat template, that repeats itself"
        )
    return text


def messages_of(row: Row, config: PromptDataOptions) -> str | list[Message]:
    """Return the prompt of one row: a text, or with the chat template messages.

    Errors as `render`. If an environment's reset may bring the prompt, it is an empty message.
    """
    columns, key = row.columns, config.input_key
    by_reset = config.environment is not None and _has_no_prompt(row, key)
    content = "" if by_reset else _column(row, key)
    with row.placed():
        if isinstance(content, str):
            text = content if by_reset else _text_of(columns, content, config)
            if not config.apply_chat_template:
                return text
            talk = in_context(columns, Conversation(({"role": "user", "content": text},)))
        else:
            talk = read_conversation(columns, key, speaker="user")
            _check_options(key, config)
        return _with_system(talk, config)


def _text_of(columns: Mapping[str, object], text: str, config: PromptOptions) -> str:
    """Return the text of a prompt, with Alpaca's input, in `input_template`."""
    key = config.input_key
    if is_alpaca(columns) and key == "input":
        raise DataError(
            "input belongs to the columns instruction and output (Alpaca): set --input_key "
            "instruction, which takes both"
        )
    if is_alpaca(columns) and key == "instruction":
        text = alpaca_prompt(columns)
    if config.input_template is not None:
        text = PROMPT_SLOT.sub(lambda _: text, config.input_template, count=1)
    if not text.strip():
        raise DataError(f"the prompt {key!r} is empty")
    return text


def _with_system(talk: Conversation, config: PromptOptions) -> list[Message]:
    """Return the messages of a prompt, behind `system_prompt` if it is set."""
    require_asked(talk.messages)
    if config.system_prompt is None:
        return [*talk.messages]
    if talk.messages[0]["role"] == SYSTEM:
        raise DataError(
            "the row has a system message and --system_prompt gives another: drop one of them"
        )
    return [{"role": SYSTEM, "content": config.system_prompt}, *talk.messages]


def _check_options(key: str, config: PromptOptions) -> None:
    if not config.apply_chat_template:
        raise DataError(f"column {key!r} holds chat messages: add --apply_chat_template")
    if config.input_template is not None:
        raise DataError(
            f"--input_template fits string prompts only, column {key!r} holds chat messages"
        )


def found_keys(columns: Mapping[str, object], config: PromptOptions) -> dict[str, object]:
    """Return the options for the prompts of rows without the default column.

    A single column of a known name is taken, with the chat template for messages. Of Alpaca's
    columns `instruction` is taken, which brings its `input`.

    Args:
        columns: Columns of the first row.
        config: Options; `input_key` and `apply_chat_template` are read.
    """
    if config.input_key != TrainConfig.input_key:
        return {}
    names = [name for name in INPUT_KEYS if name in columns]
    if is_alpaca(columns):
        names = ["instruction"]
    if len(names) != 1 or names[0] == config.input_key:
        return {}
    options: dict[str, object] = {"input_key": names[0]}
    if not isinstance(columns[names[0]], str) and not config.apply_chat_template:
        options["apply_chat_template"] = True
    return options


def as_flags(options: Mapping[str, object]) -> str:
    """Return the options as command-line flags."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items()
    )


def tokenise(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    config: PromptDataOptions,
    contents: Sequence[str | Sequence[Message] | None] = (),
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the text and token ids of the prompts of some rows, or of contents instead.

    Raises:
        DataError: As for `render`, or a prompt has no tokens.
    """
    contents = contents or [None] * len(rows)
    texts = [
        render(row, tokenizer, config, content) for row, content in zip(rows, contents, strict=True)
    ]
    for row, text in zip(rows, texts, strict=True):
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise DataError(
                f"{row.location}: the rendered prompt has half of a surrogate pair, which is no "
                f"character: got {text[:80]!r}"
            ) from err
    if config.apply_chat_template:  # it writes the special tokens
        token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        token_ids = prompt_ids(tokenizer, texts)
    for row, text, ids in zip(rows, texts, token_ids, strict=True):
        if not ids:
            raise DataError(f"{row.location}: the prompt has no tokens: {text[:80]!r}")
    return [(text, tuple(ids)) for text, ids in zip(texts, token_ids, strict=True)]


def label_of(row: Row, config: PromptOptions) -> str | None:
    """Return the reference answer as text; numbers, lists and objects as JSON; None if absent."""
    if config.label_key is None:
        return None
    label = row.columns.get(config.label_key)
    if label is None or isinstance(label, str):
        return label
    return json.dumps(label, ensure_ascii=False, default=str)


def _column(row: Row, name: str) -> object:
    if name in row.columns:
        return row.columns[name]
    guesses = _likely_keys(row, name)
    hint = f"; set --input_key {guesses[0]}" if guesses else "; set --input_key to one of them"
    raise DataError(f"{row.location}: no column {name!r}, found {named_columns(row.columns)}{hint}")


def _has_no_prompt(row: Row, name: str) -> bool:
    """Return whether the row has no prompt, in this column or another likely one."""
    if name in row.columns:
        return row.columns[name] is None
    return not _likely_keys(row, name)


def _likely_keys(row: Row, name: str) -> list[str]:
    """Return the columns that a missing name may mean, the likeliest first."""
    nearest = difflib.get_close_matches(name, list(row.columns), n=1)
    return nearest or [column for column in INPUT_KEYS if column in row.columns]


def render_chat(row: Row, tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """Return the text of a row's messages and tools, up to the assistant's header.

    Raises:
        DataError: The chat template refuses them, or drops meaningful parts.
    """
    with row.placed():
        if isinstance(tokenizer, RowTokenizer):
            tokenizer = tokenizer.for_row(row.columns)
        by_row = not isinstance(tokenizer, RowTokenizer) or tokenizer.shows_row_tools
        template, tools = template_of(tokenizer), read_tools(row.columns) if by_row else ()
        note_unread_keys(row.columns, template.unread_keys(messages, tools))
        return template.render(messages, tools, asks=True)


def teacher_prompt_ids(
    rows: Sequence[Row], tokenizer: Tokenizer, config: PromptDataOptions
) -> list[tuple[int, ...]]:
    """Return token ids of each row's prompt with the text of `teacher_prompt_column` behind it.

    The text follows that of the prompt, or of the user's last message, after an empty line.

    Raises:
        DataError: A row has no text there, or no prompt.
    """
    return [
        ids
        for _, ids in tokenise([_shown_to_teacher(row, config) for row in rows], tokenizer, config)
    ]


def teacher_name(columns: Mapping[str, object], config: TeacherOptions, place: str) -> str:
    """Return the name of a row's teacher.

    Raises:
        DataError: The row names none of the teachers.
    """
    name, names = columns.get(config.teacher_column), tuple(config.teacher_places)
    if name not in names:
        raise DataError(
            f"{place}: column {config.teacher_column!r} holds {name!r}, expected the name of one "
            f"of teachers: {', '.join(names)}"
        )
    return str(name)


def _shown_to_teacher(row: Row, config: PromptDataOptions) -> Row:
    name = str(config.teacher_prompt_column)
    text, prompt = row.columns.get(name), row.columns.get(config.input_key)
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"{row.location}: expected a text for the teacher in column {name!r}, found "
            f"{', '.join(map(repr, row.columns))}; set --teacher_prompt_column to one of them"
        )
    longer: object = prompt
    if isinstance(prompt, str):
        longer = f"{prompt}\n\n{text}"
    elif isinstance(prompt, Sequence):
        longer = _with_text(prompt, text, row)
    columns = {**dict(row.columns.items()), config.input_key: longer}
    return replace(row, columns=columns)


def _with_text(messages: Sequence[object], text: str, row: Row) -> list[object]:
    """Return the messages with the text added to the user's last one."""
    extended = list(messages)
    for place in reversed(range(len(extended))):
        message = extended[place]
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                extended[place] = {**message, "content": f"{content}\n\n{text}"}
                return extended
    raise DataError(f"{row.location}: no message of the user is a text that could be added to")
