"""Images and videos of data rows: where they stand, what they are, and how prompts name them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from lightrft.config import TrainConfig
from lightrft.datasets.files import Row
from lightrft.datasets.render import PromptTokenizer, RowTokenizer, messages_of
from lightrft.datasets.types import DataError, Prompt
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.sources import ImageSource, MediaError, VideoSource, as_image, as_video

# How plain texts of data sets mark the places of media.
_MARK = re.compile(r"<(image|video)>")


@dataclass(frozen=True, slots=True)
class RowMediaSources:
    """The media of one row, in order."""

    images: tuple[ImageSource, ...] = ()
    videos: tuple[VideoSource, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.images and not self.videos


def media_of(row: Row, config: TrainConfig) -> RowMediaSources:
    """The images and videos of one row.

    Raises:
        DataError: One is missing or of no known form, or there are more than allowed.
    """
    if config.text_only:
        return RowMediaSources()
    try:
        images = tuple(
            as_image(item, name=f"{row.location}: image {i}", folder=row.folder)
            for i, item in enumerate(_listed(row.columns.get(config.images_key)), start=1)
        )
        videos = tuple(
            as_video(item, name=f"{row.location}: video {i}", folder=row.folder)
            for i, item in enumerate(_listed(row.columns.get(config.videos_key)), start=1)
        )
    except MediaError as error:
        raise DataError(str(error)) from error
    _check_count(row, "image", len(images), config.limit_mm_image_per_prompt)
    _check_count(row, "video", len(videos), config.limit_mm_video_per_prompt)
    return RowMediaSources(images, videos)


def check_no_media(rows: Sequence[Row], config: TrainConfig) -> None:
    """Raises a DataError if a row has media, for a model that reads text only."""
    for row in rows:
        media = media_of(row, config)
        if not media.is_empty:
            kind, key = (
                ("images", config.images_key) if media.images else ("videos", config.videos_key)
            )
            raise DataError(
                f"{row.location}: column {key!r} holds {kind}, and the model reads text only: "
                "train a vision-language model, or leave the media out with --text_only"
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
        """A row's prompt as the model reads it.

        Args:
            row: The row.
            prompt: With its media, and what was made of the other columns.
            config: How prompts are rendered.

        Raises:
            DataError: A medium cannot be read, or the text names another number of media.
        """
        media, content = RowMediaSources(prompt.images, prompt.videos), messages_of(row, config)
        if isinstance(content, str):
            text = content
        else:
            chat = with_media(content, media, row.location)
            shown = self.for_row(row.columns)
            text = str(shown.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        try:
            encoded = self.encoder.encode(text, images=media.images, videos=media.videos)
        except MediaError as error:
            raise DataError(str(error)) from error
        except (ValueError, IndexError, TypeError, StopIteration) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(
                f"{row.location}: {len(media.images)} images and {len(media.videos)} videos do "
                f"not fit the prompt {text[:80]!r}: {first}"
            ) from error
        if not encoded.kinds:
            raise DataError(
                f"{row.location}: the prompt {text[:80]!r} names no place for its media; write "
                "<image> or <video> where they belong"
            )
        return replace(prompt, text=text, token_ids=encoded.token_ids)


def with_media(
    messages: Sequence[Mapping[str, object]], media: RowMediaSources, location: str
) -> list[dict[str, object]]:
    """Messages whose contents name their media as parts.

    A text has `<image>` and `<video>` where its media belong; a chat whose texts have none, and
    no such parts, begins the first message of the user with them.

    Raises:
        DataError: The chat names another number of media than the row has.
    """
    chat = [{**message, "content": _parts(message["content"])} for message in messages]
    counts = {"image": len(media.images), "video": len(media.videos)}
    named = {
        kind: sum(part.get("type") == kind for message in chat for part in _as_parts(message))
        for kind in counts
    }
    if not any(named.values()):
        first = next((message for message in chat if message["role"] == "user"), chat[0])
        marks = [{"type": kind} for kind, count in counts.items() for _ in range(count)]
        first["content"] = [*marks, *_as_parts(first)]
    elif named != counts:
        raise DataError(
            f"{location}: the prompt names {named['image']} images and {named['video']} videos, "
            f"and the row has {counts['image']} and {counts['video']}"
        )
    return chat


def _as_parts(message: Mapping[str, object]) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", message["content"])


def as_parts(content: object) -> list[dict[str, object]]:
    """The content of a message as parts; the text of one without parts stays as it is."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(cast("Sequence[dict[str, object]]", content))


def _parts(content: object) -> list[dict[str, object]]:
    if isinstance(content, str):
        pieces = _MARK.split(content)
        return [
            {"type": piece} if i % 2 else {"type": "text", "text": piece}
            for i, piece in enumerate(pieces)
            if piece or i % 2
        ]
    found: list[dict[str, object]] = []
    for part in cast("Sequence[object]", content):
        if isinstance(part, Mapping):
            kind = {"image_url": "image", "video_url": "video"}.get(str(part.get("type")))
            # Media come from their columns.
            is_text = part.get("type") == "text"
            found.append(dict(part) if is_text else {"type": kind or part.get("type")})
        else:
            found += _parts(str(part))
    return found
