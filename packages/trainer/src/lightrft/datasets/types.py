"""The record of one data row, and what is wrong with one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightrft.engines.media.sources import ImageSource, VideoSource


class DataError(ValueError):
    """A data file cannot be used; the message names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt data set, rendered and tokenised.

    Args:
        id: Position of the row in its data set, stable across runs.
        text: The rendered prompt (chat template applied).
        token_ids: Its token ids, without padding.
        label: The reference answer, or None if the data set has none.
        columns: The remaining columns of the row, passed to reward functions by name.
        images: In the order of their placeholders.
        videos: Likewise.
        messages: The chat that `text` renders; () unless environments or tools need it.
        row: What an environment's `reset` gets: all columns, and the messages as `prompt`.
    """

    id: int
    text: str
    token_ids: tuple[int, ...]
    label: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict)
    images: tuple[ImageSource, ...] = ()
    videos: tuple[VideoSource, ...] = ()
    messages: tuple[Mapping[str, object], ...] = ()
    row: Mapping[str, object] = field(default_factory=dict)
