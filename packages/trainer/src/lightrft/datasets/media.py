"""Media of data rows: their columns, their sources, and their places in prompts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.files import Row
from lightrft.datasets.render import PromptTokenizer, RowTokenizer, messages_of
from lightrft.datasets.types import DataError, Prompt
from lightrft.engines.media.encoder import TEXT_ENCODER, PromptEncoder
from lightrft.engines.media.media import MEDIA_KINDS, Media
from lightrft.engines.media.sources import MediaError
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def media_columns(config: TrainConfig) -> dict[str, str]:
    """Column of the data with the media of each kind."""
    return {
        name: str(vars(config).get(f"{kind.plural}_key", kind.plural))
        for name, kind in MEDIA_KINDS.items()
    }


def media_of(row: Row, config: TrainConfig) -> Media:
    """The media of one row.

    Raises:
        DataError: One is missing or of no known form, or there are more than allowed.
    """
    if config.text_only:
        return Media()
    try:
        found = {
            kind: [
                MEDIA_KINDS[kind].read(item, name=f"{row.location}: {kind} {i}", folder=row.folder)
                for i, item in enumerate(_listed(row.columns.get(column)), start=1)
            ]
            for kind, column in media_columns(config).items()
        }
    except MediaError as error:
        raise DataError(str(error)) from error
    for kind, media in found.items():
        _check_count(row, kind, len(media), vars(config).get(f"limit_mm_{kind}_per_prompt"))
    return Media({kind: media for kind, media in found.items() if media})


def check_no_media(rows: Sequence[Row], config: TrainConfig) -> None:
    """Raises a DataError if a row has media, for a model that reads text only."""
    for row in rows:
        for kind in media_of(row, config).kinds:
            raise DataError(
                f"{row.location}: column {media_columns(config)[kind]!r} holds "
                f"{MEDIA_KINDS[kind].plural}, and the model reads text only: train a "
                "vision-language model, or leave the media out with --text_only"
            )


def _listed(value: object) -> Sequence[object]:
    """A column as a list: nothing, one medium or several; lists of lists are joined."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [item for each in value for item in (_listed(each) if _is_group(each) else [each])]
    return [value]


def _is_group(value: object) -> bool:
    return value is None or isinstance(value, tuple)


def _check_count(row: Row, kind: str, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise DataError(
            f"{row.location}: {count} {kind}s, more than --limit_mm_{kind}_per_prompt {limit}; "
            "raise it or leave the row out"
        )


class RowRenderer(PromptTokenizer, RowTokenizer, Protocol):
    """A tokenizer of prompts that shows rows different tools."""


class TextModality:
    """Renders rows for a model that reads text only, and refuses their media.

    Args:
        renderer: Tokenizer of the model.
        has_model: There is a model; without one media are left unread.
    """

    encoder = TEXT_ENCODER
    processor = None

    def __init__(self, renderer: "PreTrainedTokenizerBase", *, has_model: bool = True) -> None:
        self.renderer = renderer
        self._has_model = has_model

    def showing(self, chat: RowRenderer) -> PromptTokenizer:
        """The reader of rows whose prompts show tools."""
        return chat

    def check_turns(self) -> None:
        """Nothing: there are no media to stand behind a prompt."""

    def check(self, rows: Sequence[Row], config: TrainConfig) -> None:
        """Raises a DataError if a row has media."""
        if self._has_model:
            check_no_media(rows, config)

    def renders(self, media: Media) -> bool:
        """Whether `prompt` renders a row with these media."""
        del media
        return False

    def prompt(self, row: Row, prompt: Prompt, config: TrainConfig) -> Prompt:
        """The prompt as it is."""
        del row, config
        return prompt


class VisionPrompts:
    """Renders and encodes rows for a vision-language model.

    Args:
        encoder: Of the model.
        chat: Renders in its place, for environments whose tools prompts show.
    """

    def __init__(self, encoder: PromptEncoder, chat: RowTokenizer | None = None) -> None:
        self.encoder = encoder
        self._chat = chat
        processor = encoder.processor
        self.chat_template: str | None = (
            processor.chat_template or processor.tokenizer.chat_template
        )
        self.all_special_ids: list[int] = processor.tokenizer.all_special_ids

    @property
    def renderer(self) -> "VisionPrompts":
        """Itself."""
        return self

    @property
    def processor(self) -> "ProcessorMixin":
        """Of the model."""
        return self.encoder.processor

    def showing(self, chat: RowRenderer) -> PromptTokenizer:
        """The reader of rows whose prompts show tools."""
        return VisionPrompts(self.encoder, chat)

    def check_turns(self) -> None:
        """Raises a ConfigError if media cannot stand behind a prompt."""
        family = self.encoder.family
        if family.attends_to_images:
            raise ConfigError(
                f"models of type {family.model_type} attend to images beside the text, which turns "
                "of an environment cannot extend: take another family, or leave environment and "
                "tools out"
            )

    def check(self, rows: Sequence[Row], config: TrainConfig) -> None:
        """Nothing: `prompt` refuses what cannot be read."""

    def renders(self, media: Media) -> bool:
        """Whether `prompt` renders a row with these media."""
        return bool(media)

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> Mapping[str, list[list[int]]]:
        """Token ids of texts without media."""
        found: Mapping[str, list[list[int]]] = self.encoder.processor.tokenizer(
            text, add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens
        )
        return found

    def convert_ids_to_tokens(self, ids: int) -> str:
        """The text of a special token."""
        return str(self.encoder.processor.tokenizer.convert_ids_to_tokens(ids))

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, object]] | None = None,
    ) -> object:
        """The rendered conversation, by the processor's template, which reads contents as parts."""
        return self.encoder.processor.apply_chat_template(
            [{**message, "content": as_parts(message["content"])} for message in conversation],
            chat_template=self.chat_template,
            tools=tools,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
        )

    def for_row(self, columns: Mapping[str, object]) -> PromptTokenizer:
        """The renderer of one row."""
        return self if self._chat is None else self._chat.for_row(columns)

    def prompt(self, row: Row, prompt: Prompt, config: TrainConfig) -> Prompt:
        """A row's prompt as the model reads it; one without media as it is.

        Args:
            row: The row.
            prompt: With its media and the other columns.
            config: How prompts are rendered.

        Raises:
            DataError: A medium cannot be read, or the text names another number of media.
        """
        media, content = prompt.media, messages_of(row, config)
        if not media:
            return prompt
        if isinstance(content, str):
            text = content
        else:
            chat = with_media(content, media, row.location)
            shown = self.for_row(row.columns)
            text = str(shown.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        try:
            encoded = self.encoder.encode(text, media)
        except MediaError as error:
            raise DataError(str(error)) from error
        except (ValueError, IndexError, TypeError, StopIteration) as error:
            first = first_line(error)
            raise DataError(
                f"{row.location}: {media.counts} do not fit the prompt {text[:80]!r}: {first}"
            ) from error
        if not encoded.kinds:
            raise DataError(
                f"{row.location}: the prompt {text[:80]!r} names no place for its media; write "
                "<image> or <video> where they belong"
            )
        return replace(prompt, text=text, token_ids=encoded.token_ids)


# Renders and reads the prompts of a model.
Modality: TypeAlias = TextModality | VisionPrompts


def with_media(
    messages: Sequence[Mapping[str, object]], media: Media, location: str
) -> list[dict[str, object]]:
    """Messages whose contents name their media as parts.

    A text has `<image>` and `<video>` where its media belong; a chat whose texts have none, and
    no such parts, begins the first message of the user with them.

    Raises:
        DataError: The chat names another number of media than the row has.
    """
    chat = [{**message, "content": _parts(message["content"])} for message in messages]
    counts = {kind: len(media[kind]) for kind in MEDIA_KINDS}
    types = [part.get("type") for message in chat for part in as_parts(message["content"])]
    named = {kind: types.count(kind) for kind in counts}
    if not any(named.values()):
        first = next((message for message in chat if message["role"] == "user"), chat[0])
        marks = [{"type": kind} for kind, count in counts.items() for _ in range(count)]
        first["content"] = [*marks, *as_parts(first["content"])]
    elif named != counts:
        names = [f"{named[kind]} {row.plural}" for kind, row in MEDIA_KINDS.items()]
        raise DataError(
            f"{location}: the prompt names {' and '.join(names)}, and the row has "
            f"{' and '.join(map(str, counts.values()))}"
        )
    return chat


def as_parts(content: object) -> list[dict[str, object]]:
    """The content of a message as parts; the text of one without parts stays as it is."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(cast("Sequence[dict[str, object]]", content))


def _parts(content: object) -> list[dict[str, object]]:
    if isinstance(content, str):
        # Marks of the places of media in the plain texts of data sets.
        pieces = re.split(rf"<({'|'.join(MEDIA_KINDS)})>", content)
        return [
            {"type": piece} if i % 2 else {"type": "text", "text": piece}
            for i, piece in enumerate(pieces)
            if piece or i % 2
        ]
    found: list[dict[str, object]] = []
    for part in cast("Sequence[object]", content):
        if isinstance(part, Mapping):
            kind = str(part.get("type"))
            named = kind.removesuffix("_url")
            # Media come from their columns.
            is_text, is_medium = kind == "text", named in MEDIA_KINDS
            found.append(
                dict(part) if is_text else {"type": named if is_medium else part.get("type")}
            )
        else:
            found += _parts(str(part))
    return found
