"""Encoder of a model that reads text alone, and the type of both encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from lightrft.engines.media.media import EncodedPrompt, LaterImages, Media, MediumKind

if TYPE_CHECKING:
    from lightrft.engines.media.encoder import PromptEncoder
    from lightrft.engines.types import MediaBounds


class TextEncoder:
    """Encoder of a text-only model: all its results are empty.

    Args:
        model_type: Type of a model with towers whose inputs are not known; "" for models of text.
    """

    reads_media = False
    marks: Mapping[MediumKind, str] = MappingProxyType({})
    placeholders = frozenset[str]()

    def __init__(self, model_type: str = "") -> None:
        self.model_type = model_type

    def check_places(self, text: str, media: Media) -> None:
        """Do nothing; implement `PromptEncoder.check_places`."""

    def kept(self, text: str, media: Media) -> EncodedPrompt:
        """Raise a ValueError: no prompt may have media."""
        raise ValueError(
            f"the prompt {text[:80]!r} has {media.counts}: the trainer needs the model's processor "
            "(processor=) and a vision-language model"
        )

    def kept_all(self, prompts: Sequence[tuple[str, Media]]) -> list[EncodedPrompt]:
        """Return `kept` of each prompt."""
        return [self.kept(text, media) for text, media in prompts]

    def row(
        self, token_ids: Sequence[int], prompt: EncodedPrompt | None, later: Sequence[LaterImages]
    ) -> EncodedPrompt | None:
        """Return the prompt unchanged."""
        del token_ids, later
        return prompt

    def num_places(self, text: str) -> int:
        """Return 0: a text model has no places for images."""
        del text
        return 0

    def fitted(self, media: Media, bounds: MediaBounds) -> Media:
        """Return the media unchanged."""
        del bounds
        return media

    @property
    def num_kept(self) -> int:
        """Number of kept prompts: none."""
        return 0

    def bytes_since(self, number: int) -> int:
        """Return 0: no prompts are kept."""
        del number
        return 0

    def forget(self, number: int = 0) -> None:
        """Do nothing: no prompts are kept."""


TEXT_ENCODER = TextEncoder()
Encoder: TypeAlias = "TextEncoder | PromptEncoder"
