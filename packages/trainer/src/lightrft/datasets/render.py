"""From the columns of a row to the text a model is prompted with."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

from lightrft.config import TrainConfig
from lightrft.config.rules import PROMPT_SLOT
from lightrft.datasets.files import Row
from lightrft.datasets.text_ids import TextTokenizer, prompt_ids
from lightrft.datasets.types import DataError

# Some million tokens, more than any model takes.
MAX_PROMPT_CHARACTERS = 2**24
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


class PromptTokenizer(TextTokenizer, Protocol):
    """The interface of a Hugging Face tokenizer that prompts need."""

    chat_template: str | None

    # No signature: transformers' names texts alone as contents, templates take parts of media, too.
    @property
    def apply_chat_template(self) -> Callable[..., object]:
        """`(conversation, *, tokenize, add_generation_prompt)`; text with tokenize=False."""
        ...


@runtime_checkable
class RowTokenizer(Protocol):
    """A tokenizer that shows rows different tools."""

    def for_row(self, columns: Mapping[str, object]) -> PromptTokenizer:
        """The tokenizer of one row; a DataError where the row names none."""
        ...


def check_tokenizer(tokenizer: PromptTokenizer, config: TrainConfig) -> None:
    """Raise a DataError if the chat template is asked for and the tokenizer has none."""
    if config.apply_chat_template and not tokenizer.chat_template:
        raise DataError(
            "--apply_chat_template: the tokenizer has no chat template; use an instruct model, put "
            "a chat_template into its tokenizer_config.json, or use --input_template instead"
        )


def render(
    row: Row,
    tokenizer: PromptTokenizer,
    config: TrainConfig,
    content: str | Sequence[dict[str, object]] | None = None,
) -> str:
    """The text of the prompt of one row.

    Args:
        row: The row.
        tokenizer: Has the chat template.
        config: Names the column, and how it is rendered.
        content: In the place of what the column holds, see `messages_of`.

    Raises:
        DataError: the column is missing or neither a non-empty string nor a list of messages, or
            messages come without the chat template.
    """
    content = messages_of(row, config) if content is None else content
    text = content if isinstance(content, str) else _chat(row, tokenizer, list(content))
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise DataError(
            f"{row.location}: the prompt has {len(text)} characters: expected at most "
            f"{MAX_PROMPT_CHARACTERS}; look for a column, or a chat template, that repeats itself"
        )
    return text


def messages_of(row: Row, config: TrainConfig) -> str | list[dict[str, object]]:
    """The prompt of one row: a text, or with the chat template its messages; errors as `render`.

    A row without one gets a user's message without text where an environment's reset may give it.
    """
    messages: list[dict[str, object]] = [{"role": "user", "content": ""}]
    if config.environment is None or not _has_no_prompt(row, config.input_key):
        content = _column(row, config.input_key)
        if not isinstance(content, str):
            messages = _messages(row, content, config)
        else:
            text, template = content, config.input_template
            if template is not None:
                text = PROMPT_SLOT.sub(lambda _: content, template, count=1)
            if not text.strip():
                raise DataError(f"{row.location}: the prompt {config.input_key!r} is empty")
            if not config.apply_chat_template:
                return text
            messages[0]["content"] = text
    if config.system_prompt is not None:
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return messages


def tokenise(
    rows: Sequence[Row],
    tokenizer: PromptTokenizer,
    config: TrainConfig,
    contents: Sequence[str | Sequence[dict[str, object]] | None] = (),
) -> list[tuple[str, tuple[int, ...]]]:
    """Text and token ids of the prompts of some rows, or of contents in their place.

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
    if config.apply_chat_template:  # which writes the special tokens itself
        token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        token_ids = prompt_ids(tokenizer, texts)
    for row, text, ids in zip(rows, texts, token_ids, strict=True):
        if not ids:
            raise DataError(f"{row.location}: the prompt has no tokens: {text[:80]!r}")
    return [(text, tuple(ids)) for text, ids in zip(texts, token_ids, strict=True)]


def label_of(row: Row, config: TrainConfig) -> str | None:
    """The reference answer as text; numbers, lists and objects as JSON; None if absent."""
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
    raise DataError(
        f"{row.location}: no column {name!r}, found {', '.join(map(repr, row.columns))}{hint}"
    )


def _has_no_prompt(row: Row, name: str) -> bool:
    """Whether neither the column has one nor any other that may be meant."""
    if name in row.columns:
        return row.columns[name] is None
    return not _likely_keys(row, name)


def _likely_keys(row: Row, name: str) -> list[str]:
    """Columns that may be meant by a name of none, the likeliest first."""
    nearest = difflib.get_close_matches(name, list(row.columns), n=1)
    return nearest or [column for column in INPUT_KEYS if column in row.columns]


def _messages(row: Row, content: object, config: TrainConfig) -> list[dict[str, object]]:
    key = config.input_key
    if not isinstance(content, Sequence) or not content:
        raise DataError(
            f"{row.location}: column {key!r} must hold a string or a list of chat messages, got "
            f"{type(content).__name__} {str(content)[:80]!r}"
        )
    for number, message in enumerate(content, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise DataError(
                f"{row.location}: message {number} of column {key!r} must be an object with role "
                f"and content, got {str(message)[:80]!r}"
            )
    if not config.apply_chat_template:
        raise DataError(
            f"{row.location}: column {key!r} holds chat messages: add --apply_chat_template"
        )
    if config.input_template is not None:
        raise DataError(
            f"{row.location}: --input_template fits string prompts only, column {key!r} holds "
            "chat messages"
        )
    messages = [dict(message) for message in content]
    if config.system_prompt is not None and messages[0]["role"] == "system":
        raise DataError(
            f"{row.location}: the row has a system message and --system_prompt gives another: "
            "drop one of them"
        )
    return messages


def _chat(row: Row, tokenizer: PromptTokenizer, messages: list[dict[str, object]]) -> str:
    if isinstance(tokenizer, RowTokenizer):
        try:
            tokenizer = tokenizer.for_row(row.columns)
        except DataError as error:
            raise DataError(f"{row.location}: {error}") from error
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as err:  # a template is a program of the model's author; it may raise anything
        raise DataError(f"{row.location}: the chat template refused the messages: {err}") from err
    return cast("str", text)


def teacher_prompt_ids(
    rows: Sequence[Row], tokenizer: PromptTokenizer, config: TrainConfig
) -> list[tuple[int, ...]]:
    """Token ids of each row's prompt with the text of `teacher_prompt_column` behind it.

    The text follows that of the prompt, or of the user's last message, after an empty line.

    Raises:
        DataError: A row has no text there, or no prompt.
    """
    return [
        ids
        for _, ids in tokenise([_shown_to_teacher(row, config) for row in rows], tokenizer, config)
    ]


def teacher_name(columns: Mapping[str, object], config: TrainConfig, place: str) -> str:
    """The name of a row's teacher.

    Raises:
        DataError: The row names none of them.
    """
    name, names = columns.get(config.teacher_column), tuple(config.teacher_places)
    if name not in names:
        raise DataError(
            f"{place}: column {config.teacher_column!r} holds {name!r}, expected the name of one "
            f"of teachers: {', '.join(names)}"
        )
    return str(name)


def _shown_to_teacher(row: Row, config: TrainConfig) -> Row:
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
    return replace(row, columns={**row.columns, config.input_key: longer})


def _with_text(messages: Sequence[object], text: str, row: Row) -> list[object]:
    """The messages, the user's last one longer."""
    found = list(messages)
    for place in reversed(range(len(found))):
        message = found[place]
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                found[place] = {**message, "content": f"{content}\n\n{text}"}
                return found
    raise DataError(f"{row.location}: no message of the user is a text that could be added to")
