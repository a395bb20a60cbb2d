"""Record of a data row, and the error for unusable ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.engines.media.media import Media

if TYPE_CHECKING:
    from lightrft.engines.media.sources import ImageSource


class DataError(ValueError):
    """A data file cannot be used; the message names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Row of a prompt data set, rendered and tokenised.

    Args:
        id: Position of the row in its data set, stable across runs.
        text: Rendered prompt (chat template applied).
        token_ids: Its token ids, without padding.
        label: Reference answer, or None if the data set has none.
        columns: Remaining columns of the row, passed to reward functions by name.
        media: Media in the order of their placeholders.
        messages: Chat that `text` renders; () for a text without a chat template.
        row: Arguments of an environment's `reset`: all columns, and the messages as `prompt`.
        teacher_token_ids: Prompt that a teacher reads instead; () without one.
        draw_probability: Mean share of this row among all draws; None is not known.
        draw_weight: 1 / (number of rows x draw_probability), with which a mean over drawn rows is
            that over all rows; 1 if the probability is not known.
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
    draw_probability: float | None = None
    draw_weight: float = 1.0

    @property
    def key(self) -> tuple[object, ...]:
        """Key that equal prompts share: token ids, and the digests of the media."""
        return self.token_ids, *(medium.digest for medium in self.media)

    @property
    def images(self) -> "tuple[ImageSource, ...]":
        """Images of the prompt."""
        return self.media.images
