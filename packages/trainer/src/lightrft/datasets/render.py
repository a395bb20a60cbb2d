"""From the columns of a row to the text a model is prompted with."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from lightrft.datasets.errors import DataError

if TYPE_CHECKING:
    from lightrft.datasets.files import Row

INPUT_KEYS = (
    "input", "prompt", "question", "problem", "instruction", "query", "messages", "conversations",
)  # fmt: skip
# The slot of an input template. `\boxed{}` in a template is LaTeX, not the slot.
_SLOT = re.compile(r"(?<![A-Za-z])\{\}")


class PromptTokenizer(Protocol):
    """What prompts need of a Hugging Face tokenizer."""

    chat_template: str | None

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Token ids under the key `input_ids`."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> object:
        """The rendered conversation: a string with tokenize=False."""
        ...


@dataclass(frozen=True, slots=True)
class PromptFormat:
    r"""How rows become prompts.

    Args:
        input_key: Column with the prompt: a string, or a list of chat messages.
        label_key: Column with the reference answer; None if there is none.
        apply_chat_template: Render by the tokenizer's chat template, generation prompt added.
        system_prompt: System message in front; needs the chat template.
        input_template: Text in which the first `{}` is replaced by a string prompt. A `{}` right
            after a letter, as in `\\boxed{}`, is not the slot.

    Raises:
        DataError: a system prompt without the chat template, or a template without `{}`.
    """

    input_key: str = "input"
    label_key: str | None = "label"
    apply_chat_template: bool = False
    system_prompt: str | None = None
    input_template: str | None = None

    def __post_init__(self) -> None:
        if self.system_prompt is not None and not self.apply_chat_template:
            raise DataError(
                "system_prompt is a message of the chat template: add --apply_chat_template"
            )
        if self.input_template is not None and not _SLOT.search(self.input_template):
            raise DataError(
                f"input_template must contain {{}} where the prompt goes: got "
                f"{self.input_template!r}"
            )


def check_tokenizer(tokenizer: PromptTokenizer, prompt_format: PromptFormat) -> None:
    """Raise a DataError if the chat template is asked for and the tokenizer has none."""
    if prompt_format.apply_chat_template and not tokenizer.chat_template:
        raise DataError(
            "--apply_chat_template: the tokenizer has no chat template; use an instruct model, put "
            "a chat_template into its tokenizer_config.json, or use --input_template instead"
        )


def render(row: Row, tokenizer: PromptTokenizer, prompt_format: PromptFormat) -> str:
    """The text of the prompt of one row.

    Raises:
        DataError: the column is missing or neither a non-empty string nor a list of messages, or
            messages come without the chat template.
    """
    content = _column(row, prompt_format.input_key)
    if isinstance(content, str):
        text = _fill(prompt_format.input_template, content)
        if not text.strip():
            raise DataError(f"{row.location}: the prompt {prompt_format.input_key!r} is empty")
        if not prompt_format.apply_chat_template:
            return text
        messages: list[dict[str, object]] = [{"role": "user", "content": text}]
    else:
        messages = _messages(row, content, prompt_format)
    return _chat(row, tokenizer, messages, prompt_format.system_prompt)


def tokenise(
    rows: Sequence[Row], tokenizer: PromptTokenizer, prompt_format: PromptFormat
) -> list[tuple[str, tuple[int, ...]]]:
    """Text and token ids of the prompts of some rows.

    Raises:
        DataError: As for `render`, or a prompt has no tokens.
    """
    texts = [render(row, tokenizer, prompt_format) for row in rows]
    # A chat template writes the special tokens itself.
    add_special_tokens = not prompt_format.apply_chat_template
    token_ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    for row, text, ids in zip(rows, texts, token_ids, strict=True):
        if not ids:
            raise DataError(f"{row.location}: the prompt has no tokens: {text[:80]!r}")
    return [(text, tuple(ids)) for text, ids in zip(texts, token_ids, strict=True)]


def label_of(row: Row, prompt_format: PromptFormat) -> str | None:
    """The reference answer as text; numbers, lists and objects as JSON; None if absent."""
    if prompt_format.label_key is None:
        return None
    label = row.columns.get(prompt_format.label_key)
    if label is None or isinstance(label, str):
        return label
    return json.dumps(label, ensure_ascii=False, default=str)


def _fill(template: str | None, text: str) -> str:
    if template is None:
        return text
    return _SLOT.sub(lambda _: text, template, count=1)


def _column(row: Row, name: str) -> object:
    if name in row.columns:
        return row.columns[name]
    nearest = difflib.get_close_matches(name, list(row.columns), n=1)
    guesses = nearest or [column for column in INPUT_KEYS if column in row.columns]
    hint = f"; set --input_key {guesses[0]}" if guesses else "; set --input_key to one of them"
    raise DataError(
        f"{row.location}: no column {name!r}, found {', '.join(map(repr, row.columns))}{hint}"
    )


def _messages(row: Row, content: object, prompt_format: PromptFormat) -> list[dict[str, object]]:
    key = prompt_format.input_key
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
    if not prompt_format.apply_chat_template:
        raise DataError(
            f"{row.location}: column {key!r} holds chat messages: add --apply_chat_template"
        )
    if prompt_format.input_template is not None:
        raise DataError(
            f"{row.location}: --input_template fits string prompts only, column {key!r} holds "
            "chat messages"
        )
    messages = [dict(message) for message in content]
    if prompt_format.system_prompt is not None and messages[0]["role"] == "system":
        raise DataError(
            f"{row.location}: the row has a system message and --system_prompt gives another: "
            "drop one of them"
        )
    return messages


def _chat(
    row: Row,
    tokenizer: PromptTokenizer,
    messages: list[dict[str, object]],
    system_prompt: str | None,
) -> str:
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as err:  # a template is a program of the model's author; it may raise anything
        raise DataError(f"{row.location}: the chat template refused the messages: {err}") from err
    return cast("str", text)
