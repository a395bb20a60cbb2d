"""The record of one data row, and the error of one that cannot be used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.engines.media.media import Media

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource


class DataError(ValueError):
    """A data file cannot be used; the message names the file, the line and the remedy."""


class LeftOutError(DataError):
    """A row that its source cannot give, and that is left out; the others are read."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt data set, rendered and tokenised.

    Args:
        id: Position of the row in its data set, stable across runs.
        text: The rendered prompt (chat template applied).
        token_ids: Its token ids, without padding.
        label: The reference answer, or None if the data set has none.
        columns: The remaining columns of the row, passed to reward functions by name.
        media: In the order of their placeholders.
        messages: The chat that `text` renders; () of a text without a chat template.
        row: Arguments of an environment's `reset`: all columns, and the messages as `prompt`.
        teacher_token_ids: The prompt that a teacher reads in its place; () without one.
    """

    id: int
    text: str
    token_ids: tuple[int, ...]
    label: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict)
    media: Media = field(default_factory=Media)
    messages: tuple[Mapping[str, object], ...] = ()
    row: Mapping[str, object] = field(default_factory=dict)
    teacher_token_ids: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal prompts: its token ids, and the digests of its media."""
        return self.token_ids, *(medium.digest for medium in self.media)

    @property
    def images(self) -> "tuple[ImageSource, ...]":
        """Its images."""
        return self.media.images
