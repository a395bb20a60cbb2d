"""Media of data rows: their columns, their sources, and their places in prompts."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from lightrft.config import ConfigError, MediaOptions, PromptDataOptions
from lightrft.datasets.files import Row
from lightrft.datasets.messages import TEXT_TYPES, Message, with_texts
from lightrft.datasets.render import RowTokenizer, messages_of, render_chat
from lightrft.datasets.types import DataError, Prompt
from lightrft.engines.media.files import MediaError, is_list_of_bytes
from lightrft.engines.media.media import MEDIA_KINDS, Media, Medium, MediumKind, PromptTokens
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder, TextEncoder
from lightrft.engines.text import Tokenizer
from lightrft.engines.types import MediaBounds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from lightrft.engines.media.encoder import PromptEncoder
    from lightrft.engines.media.families import VisionFamily

# A text, or the messages of a chat.
Content: TypeAlias = str | Sequence[Message]
OTHER_BYTES = (
    "an image has other bytes than images_sha256 says: bring back the files, or write the rows "
    "again"
)


@dataclass(frozen=True, slots=True)
class MediaRow:
    """Conversation, or text, whose media are read and have their places.

    Args:
        content: Text, or messages in which a part `{"type": kind}` stands for each medium.
        media: Media in the order of their places.
    """

    content: Content
    media: Media


def encoder_of(processor: "ProcessorMixin", family: "VisionFamily") -> Encoder:
    """Return the encoder of a model's prompts; one of text if its family or processor is not known.

    Args:
        processor, family: As for `PromptEncoder`.
    """
    if not family.reads:
        return TextEncoder(family)
    from lightrft.engines.media.encoder import PromptEncoder  # where a model reads media

    encoder = PromptEncoder(processor, family)
    return TextEncoder(family, encoder.hindrance) if encoder.hindrance else encoder


def media_columns(config: MediaOptions) -> dict[str, tuple[str, ...]]:
    """Return the columns of the data in which the media of each kind may be.

    The default, `images`, also matches a column `image`; an option matches only its name.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for name, kind in MEDIA_KINDS.items():
        column = str(vars(config).get(f"{kind.plural}_key", kind.plural))
        columns[name] = (column, name) if column == kind.plural else (column,)
    return columns


def media_row(row: Row, content: Content, config: MediaOptions, encoder: Encoder) -> MediaRow:
    """Return a text or conversation of a row with its media; every row passes this gate.

    Media are taken from the row's columns and from parts of messages, in OpenAI's form
    (`{"type": "image_url", "image_url": {"url": ...}}`) and in that of transformers
    (`{"type": "image", "image": ...}`, `url`, `path`, `base64`). A mark such as `<image>` in a
    message, or a part without a medium, is the place of the next medium of the columns. Without
    such places, the user's first message begins with the media of the columns.

    Args:
        row: Row with the columns and its location.
        content: Text without a chat template, or messages.
        config: Options with the names of the columns; `text_only` drops media and their places.
        encoder: Encoder of the model's prompts.

    Raises:
        DataError: A medium cannot be read, media and places differ in number, there are more media
            than allowed or any for a model of text, or a text holds a placeholder.
    """
    if isinstance(encoder, TextEncoder):
        if config.text_only:
            content = _without_parts(content)
        else:
            _refuse_media(row, content, config, encoder)
        return MediaRow(_as_texts(row, content), Media())
    if config.text_only:
        shown = MediaRow(_without_marks(content), Media())
    elif isinstance(content, str):
        shown = MediaRow(content, column_media(row, config))
        _check_bare_marks(row, content, encoder)
    else:
        shown = with_media(content, column_media(row, config), row)
    _check_places(row, shown.media, config)
    shown = replace(shown, media=encoder.fitted(shown.media, frame_bounds(config)))
    for kind in shown.media.kinds:
        _check_count(row, kind, len(shown.media[kind]), config)
    _check_texts(row, shown.content, encoder)
    return shown


def _check_places(row: Row, media: Media, config: MediaOptions) -> None:
    """Raise a DataError if a row names a file that it may not read, with links resolved.

    A row that names a file's SHA-256 is allowed: its writer already had the content.
    """
    allowed = [row.folder, *row.roots, *([Path(config.media_root)] if config.media_root else [])]
    roots = [os.path.realpath(folder) for folder in allowed]
    hashes = row.columns.get("images_sha256")
    known = hashes if isinstance(hashes, list) else []
    for file in (file for medium in media for file in medium.files if file.path is not None):
        path = Path(os.path.realpath(str(file.path)))
        if not any(path.is_relative_to(root) for root in roots) and file.digest not in known:
            if known:
                raise DataError(f"{row.location}: {OTHER_BYTES}")
            raise DataError(
                f"{row.location}: {path} is outside of {roots[0]}, where the media of its rows "
                "lie: move it there, or name a folder with --media_root (/ allows every file)"
            )


def frame_bounds(config: MediaOptions) -> MediaBounds:
    """Return the bounds for frames of videos, from the options."""
    return MediaBounds(
        config.max_pixels,
        config.min_pixels,
        video_fps=config.video_fps,
        video_max_frames=config.video_max_frames,
    )


def column_media(row: Row, config: MediaOptions) -> Media:
    """Return the media in the columns of one row.

    Raises:
        DataError: A medium is missing or of unknown form, or two columns hold one kind.
    """
    media: dict[MediumKind, Sequence[Medium]] = {}
    for kind, columns in media_columns(config).items():
        held = {
            name: listed for name in columns if (listed := _listed(row.columns.get(name), kind))
        }
        if len(held) > 1:
            raise DataError(
                f"{row.location}: the columns {' and '.join(held)} both hold media: name one by "
                f"--{MEDIA_KINDS[kind].plural}_key"
            )
        for values in held.values():
            media[kind] = [_read(row, kind, i, value) for i, value in enumerate(values, start=1)]
    return Media(media)


def _read(row: Row, kind: MediumKind, number: int, value: object) -> Medium:
    name = f"{row.location}: {kind} {number}"
    try:
        return MEDIA_KINDS[kind].read(value, name=name, folder=row.folder)
    except MediaError as error:
        raise DataError(str(error)) from error


def _listed(value: object, kind: MediumKind) -> list[object]:
    """Return a column as a list of no, one or several media; nested lists of images are joined."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or is_list_of_bytes(value):
        return [value]
    if kind == "image":
        return [item for each in value for item in _listed(each, kind)]
    return [item for item in value if item is not None]


def _check_count(row: Row, kind: str, count: int, config: MediaOptions) -> None:
    limit = vars(config).get(f"limit_mm_{kind}_per_prompt")
    if limit is not None and count > limit:
        raise DataError(
            f"{row.location}: {count} {kind}s, more than --limit_mm_{kind}_per_prompt {limit}; "
            "raise it or leave the row out"
        )


def _refuse_media(row: Row, content: Content, config: MediaOptions, encoder: TextEncoder) -> None:
    """Raise a DataError if a row has media, for a model that reads text only."""
    where = [
        f"column {name!r} holds {MEDIA_KINDS[kind].plural}"
        for kind, columns in media_columns(config).items()
        for name in columns
        if _listed(row.columns.get(name), kind)
    ]
    messages = [] if isinstance(content, str) else content
    where += [
        f"a message has a part of type {part['type']!r}"
        for message in messages
        for part in as_parts(message["content"])
        if _kind_of(part)
    ]
    if where:
        raise DataError(
            f"{row.location}: {where[0]}, and {encoder.hindrance}, or leave the media out with "
            "--text_only"
        )


def _check_texts(row: Row, content: Content, encoder: Encoder) -> None:
    """Raise a DataError if the model would read a message's text as the place of a medium."""
    for number, message in enumerate([] if isinstance(content, str) else content, start=1):
        texts = [str(part.get("text")) for part in as_parts(message["content"])]
        for token in sorted(encoder.placeholders):
            if any(token in text for text in texts):
                raise DataError(
                    f"{row.location}: the text of message {number} holds {token!r}, which the "
                    "model reads as the place of a medium: leave it out, or write <image> or "
                    "<video> where the row has one"
                )


def _check_bare_marks(row: Row, text: str, encoder: Encoder) -> None:
    """Raise a DataError if a text without a chat template has marks that no model knows."""
    for kind, model_mark in encoder.marks.items():
        mark = f"<{kind}>"
        if model_mark != mark and mark in text:
            raise DataError(
                f"{row.location}: without a chat template {mark} is text: add "
                f"--apply_chat_template, or write the model's own {model_mark!r}"
            )


class TextModality:
    """Renderer of rows for a model that reads text only; it refuses their media.

    Args:
        renderer: Tokenizer of the model.
        has_model: Whether there is a model; without one media stay unread.
        processor: Processor that is saved with the model; it reads nothing.
        encoder: Encoder, which says why the model takes no media.
    """

    def __init__(
        self,
        renderer: "PreTrainedTokenizerBase",
        *,
        has_model: bool = True,
        processor: "ProcessorMixin | None" = None,
        encoder: TextEncoder = TEXT_ENCODER,
    ) -> None:
        self.renderer, self.processor = renderer, processor
        self._has_model, self.encoder = has_model, encoder

    def showing(self, chat: RowTokenizer) -> Tokenizer:
        """Return the reader of rows whose prompts show tools."""
        return chat

    def check_turns(self) -> None:
        """Do nothing: there are no media to stand behind a prompt."""

    def read(self, row: Row, config: PromptDataOptions) -> MediaRow:
        """Return a row's text or messages; raise a DataError for media if there is a model."""
        content = messages_of(row, config)
        if self._has_model:
            return media_row(row, content, config, self.encoder)
        if config.text_only:
            return MediaRow(_as_texts(row, _without_parts(content)), Media())
        media = column_media(row, config)
        _check_places(row, media, config)
        return MediaRow(content, media)

    def renders(self, media: Media) -> bool:
        """Return whether `prompt` renders a row with these media."""
        del media
        return False

    def prompt(self, row: Row, prompt: Prompt, content: Content) -> Prompt:
        """Return the prompt unchanged."""
        del row, content
        return prompt


class VisionPrompts:
    """Renderer and encoder of rows for a vision-language model.

    Args:
        encoder: Encoder of the model's prompts.
        chat: Renderer to use instead, for environments whose tools prompts show.
    """

    def __init__(self, encoder: "PromptEncoder", chat: RowTokenizer | None = None) -> None:
        self.encoder = encoder
        self._chat = chat
        processor = encoder.processor
        self.chat_template: str | None = (
            processor.chat_template or processor.tokenizer.chat_template
        )

    @property
    def renderer(self) -> "VisionPrompts":
        """This object."""
        return self

    @property
    def processor(self) -> "ProcessorMixin":
        """Processor of the model."""
        return self.encoder.processor

    def showing(self, chat: RowTokenizer) -> Tokenizer:
        """Return the reader of rows whose prompts show tools."""
        return VisionPrompts(self.encoder, chat)

    def check_turns(self) -> None:
        """Raise a ConfigError if media cannot stand behind a prompt."""
        family = self.encoder.family
        if family.attends_to_images:
            raise ConfigError(
                f"models of type {family.model_type} attend to images beside the text, which later "
                "turns cannot extend: take another family, or leave environment, tools and agent "
                "out"
            )

    def read(self, row: Row, config: PromptDataOptions) -> MediaRow:
        """Return a row's text or messages with its media; errors as `media_row`."""
        return media_row(row, messages_of(row, config), config, self.encoder)

    def renders(self, media: Media) -> bool:
        """Return whether `prompt` renders a row with these media."""
        return bool(media)

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Return token ids of texts without media."""
        encoding: Mapping[str, list[list[int]]] = self.encoder.processor.tokenizer(
            text, add_special_tokens=add_special_tokens
        )
        return encoding

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, object]] | None = None,
    ) -> object:
        """Return the conversation, rendered by the processor's template with contents as parts."""
        return self.encoder.processor.apply_chat_template(
            [{**message, "content": as_parts(message["content"])} for message in conversation],
            chat_template=self.chat_template,
            tools=tools,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
        )

    @property
    def shows_row_tools(self) -> bool:
        """Return whether prompts show the tools of their rows, not those of an environment."""
        return self._chat is None

    def for_row(self, columns: Mapping[str, object]) -> Tokenizer:
        """Return the renderer of one row."""
        return self if self._chat is None else self._chat.for_row(columns)

    def prompt(self, row: Row, prompt: Prompt, content: Content) -> Prompt:
        """Return a row's prompt as the model reads it; a prompt without media as it is.

        Args:
            row: Row of the prompt.
            prompt: Prompt with its media and other columns, and with its text if it has no media.
            content: Text or messages, see `read`.

        Raises:
            DataError: A medium cannot be read, or the rendered text has another number of places.
        """
        media, text = prompt.media, prompt.text
        if media:
            text = str(content)
            if not isinstance(content, str):
                text = render_chat(row, self, content)
        with _explained(text, media, row.location):
            if not media:
                self.encoder.check_places(text, media)
                return prompt
            token_ids = self.encoder.tokens(text, media).token_ids
        if not self.encoder.ends_with_text(text):
            raise DataError(f"{row.location}: the prompt ends with a medium: put text behind it")
        return replace(prompt, text=text, token_ids=token_ids)

    def tokens(self, text: str, media: Media, location: str) -> PromptTokens:
        """Return the tokens of a text with its media as the model reads them.

        Args:
            text: Text with one placeholder for each medium.
            media: Media in order of appearance.
            location: Place of the row, for messages.

        Raises:
            DataError: A medium cannot be read, or the text has another number of placeholders.
        """
        with _explained(text, media, location):
            return self.encoder.tokens(text, media)


@contextmanager
def _explained(text: str, media: Media, location: str) -> Iterator[None]:
    """Turn an encoder's errors about a text and its media into a DataError with the place."""
    try:
        yield
    except MediaError as error:
        where = "" if location in str(error) else f"{location}: "
        raise DataError(f"{where}{error}") from error
    except ValueError as error:
        raise DataError(
            f"{location}: {media.counts} do not fit the prompt {text[:80]!r}: {error}"
        ) from error


# Renderer and reader of a model's prompts.
Modality: TypeAlias = TextModality | VisionPrompts


def with_media(messages: Sequence[Message], columns: Media, row: Row) -> MediaRow:
    """Return the messages with media as parts in their contents, and all media in that order.

    Args:
        messages: Messages of the row.
        columns: Media of its columns.
        row: Row, for errors and for paths in parts.

    Raises:
        DataError: A medium cannot be read, or messages and row differ in the number of media.
    """
    left = {kind: list(columns[kind]) for kind in MEDIA_KINDS}
    found: dict[MediumKind, list[Medium]] = {kind: [] for kind in MEDIA_KINDS}
    named = dict.fromkeys(MEDIA_KINDS, 0)

    def take(part: Mapping[str, object], kind: MediumKind) -> None:
        """Assign the medium of one part; none if the columns have no more."""
        named[kind] += 1
        value = _value_of(part, kind, row)
        if value is not None:
            found[kind].append(_read(row, kind, named[kind], value))
        elif left[kind]:
            place = len(columns[kind]) - len(left[kind])
            if part.get("index") not in (None, place):
                raise DataError(
                    f"{row.location}: a part of type {part['type']!r} has the index "
                    f"{part['index']}, and is the place of medium {place} of the column: put parts "
                    "in the order of the column"
                )
            found[kind].append(left[kind].pop(0))

    chat: list[Message] = []
    for message in messages:
        parts: list[Message] = []
        for part in _parts(message["content"]):
            kind = _checked_kind(part, row)
            if kind is not None:
                take(part, kind)
            parts.append(part if kind is None else {"type": kind})
        is_text = isinstance(message["content"], str) and not any(map(_kind_of, parts))
        chat.append(message if is_text else {**message, "content": parts})
    has = {kind: len(found[kind]) + len(left[kind]) for kind in MEDIA_KINDS}
    if not any(named.values()):
        return MediaRow(_begun(chat, columns), columns)
    if named != has:
        raise DataError(_other_number(row, named, has))
    return MediaRow(chat, Media({kind: media for kind, media in found.items() if media}))


def _begun(chat: Sequence[Message], columns: Media) -> list[Message]:
    """Return a chat whose first message of the user begins with the media of the columns."""
    first = next((message for message in chat if message["role"] == "user"), chat[0])
    marks = [{"type": kind} for kind in MEDIA_KINDS for _ in columns[kind]]
    content = [*marks, *as_parts(first["content"])] if marks else first["content"]
    place = chat.index(first)
    return [*chat[:place], {**first, "content": content}, *chat[place + 1 :]]


def _other_number(row: Row, named: Mapping[str, int], has: Mapping[str, int]) -> str:
    shown = [kind for kind in MEDIA_KINDS if kind != "audio" or named[kind] or has[kind]]
    names = [f"{named[kind]} {MEDIA_KINDS[kind].plural}" for kind in shown]
    return (
        f"{row.location}: the prompt names {' and '.join(names)}, and the row has "
        f"{' and '.join(str(has[kind]) for kind in shown)}; media are read from parts of messages "
        "and from the columns of --images_key, --videos_key and --audios_key (default: images or "
        f"image and the like), found columns {', '.join(row.columns)}"
    )


def as_parts(content: object) -> list[Message]:
    """Return the content of a message as parts; text becomes one part."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [
        dict(part) if isinstance(part, Mapping) else {"type": "text", "text": str(part)}
        for part in cast("Sequence[object]", content)
    ]


def _parts(content: object) -> list[Message]:
    """Return the parts of a content, with texts cut at their marks of media."""
    cut: list[Message] = []
    for part in as_parts(content):
        # Some forms name the kind only by the key.
        kind = part.get("type") or next((k for k in ("text", *MEDIA_KINDS) if k in part), None)
        if kind not in TEXT_TYPES:
            cut.append({**part, "type": kind})
            continue
        pieces = _marks().split(str(part.get("text") or ""))
        cut += [
            {"type": piece} if i % 2 else {"type": "text", "text": piece}
            for i, piece in enumerate(pieces)
            if piece or i % 2
        ]
    return cut


def _marks() -> re.Pattern[str]:
    """Return the pattern of marks of media in plain texts of data sets."""
    return re.compile(rf"<({'|'.join(MEDIA_KINDS)})>")


def _kind_of(part: Mapping[str, object]) -> MediumKind | None:
    """Return the kind of medium of a part; None for texts and unknown types."""
    kind = str(part.get("type")).removeprefix("input_").removesuffix("_url")
    return kind if kind in MEDIA_KINDS else None


def _checked_kind(part: Mapping[str, object], row: Row) -> MediumKind | None:
    kind = _kind_of(part)
    if kind is None and part["type"] != "text":
        raise DataError(
            f"{row.location}: a message has a part of type {part['type']!r}: expected text, "
            f"{', '.join(MEDIA_KINDS)} or image_url"
        )
    return kind


def _value_of(part: Mapping[str, object], kind: MediumKind, row: Row) -> object:
    """Return a part's description of its medium; None if the columns hold it.

    Raises:
        DataError: The part asks for something that would be ignored.
    """
    fields = {name: value for name, value in part.items() if value is not None}
    names = {
        kind,
        f"{kind}_url",
        f"input_{kind}",
        "url",
        "path",
        "bytes",
        "base64",
        "frames",
        "fps",
    }
    unknown = sorted(fields.keys() - names - {"type", "text", "index", "detail"})
    if unknown:
        raise DataError(
            f"{row.location}: a part of type {part['type']!r} has {', '.join(unknown)}: expected "
            f"{', '.join(sorted(names))}; sizes are options of the run (--max_pixels)"
        )
    return {name: value for name, value in fields.items() if name in names} or None


def _without_parts(content: Content) -> Content:
    """Return the messages without parts of media; contents without them stay as they are."""
    if isinstance(content, str):
        return content
    kept_messages = []
    for message in content:
        parts = as_parts(message["content"])
        kept = [part for part in parts if _kind_of(part) is None]
        kept_messages.append(message if len(kept) == len(parts) else {**message, "content": kept})
    return kept_messages


def _as_texts(row: Row, content: Content) -> Content:
    """Return a content for a model of text; a DataError names the row of a part that is no text."""
    with row.placed():
        return content if isinstance(content, str) else with_texts(content)


def _without_marks(content: Content) -> Content:
    """Return a text or messages without parts and marks of media."""
    if isinstance(content, str):
        return _marks().sub("", content)
    return [
        {**message, "content": [p for p in _parts(message["content"]) if _kind_of(p) is None]}
        for message in content
    ]
