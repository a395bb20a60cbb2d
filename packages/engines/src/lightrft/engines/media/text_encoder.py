"""Encoder of a model that reads text alone, and the type of both encoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from lightrft.engines.media.media import EncodedPrompt, LaterImages, Media, MediumKind

if TYPE_CHECKING:
    from lightrft.engines.media.encoder import PromptEncoder
    from lightrft.engines.media.families import VisionFamily
    from lightrft.engines.types import MediaBounds


class TextEncoder:
    """Encoder of a text-only model: all its results are empty.

    Args:
        family: Family of a model with towers; None for models of text.
        reason: Why its media cannot be read; "" if it has no processor.
    """

    reads_media = False
    marks: Mapping[MediumKind, str] = MappingProxyType({})
    placeholders = frozenset[str]()

    def __init__(self, family: VisionFamily | None = None, reason: str = "") -> None:
        self._family, self._reason = family, reason

    @property
    def hindrance(self) -> str:
        """Reason why the model takes no media, and what to train instead."""
        if self._family is None:
            return "the model reads text only: train a vision-language model"
        if self._family.reads and not self._reason:
            return "the model's folder has no processor: add its processor_config.json"
        reason = self._reason or "its class has no pixel_values, get_image_features or image token"
        return f"those of models of type {self._family.model_type!r} are not supported: {reason}"

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

    def blanks(self, kinds: Iterable[MediumKind]) -> dict[MediumKind, EncodedPrompt]:
        """Return {}: there are no kinds."""
        del kinds
        return {}

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
