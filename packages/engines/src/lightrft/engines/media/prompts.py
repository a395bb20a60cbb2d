"""A prompt with media as a model reads it, and the media of a batch of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from lightrft.engines.media.kinds import Media, MediumKind
from lightrft.engines.media.sources import ImageSource


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """One prompt as a processor gives it; the samples of the prompt share it.

    Args:
        token_ids: The prompt, with one placeholder token for each feature of its media.
        request_token_ids: The same with one placeholder for each medium, as engines take it.
        token_types: Of each of `token_ids`, the kind the model tells apart; None where the family
            has no such input.
        tensors: Inputs of the model by name, of the media of this prompt only, in order of
            appearance.
        kinds: Media that it has.
        media: Sources that it was encoded from, for engines with a processor of their own.
        sizes: Arguments that make such a processor scale images in the same way.
    """

    token_ids: tuple[int, ...]
    request_token_ids: tuple[int, ...]
    token_types: tuple[int, ...] | None
    tensors: Mapping[str, Tensor]
    kinds: frozenset[MediumKind]
    media: Media = field(default_factory=Media)
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def continued(self, token_ids: Sequence[int]) -> Self:
        """The prompt with tokens of text behind it."""
        if not token_ids:
            return self
        types = self.token_types
        return replace(
            self,
            token_ids=(*self.token_ids, *token_ids),
            request_token_ids=(*self.request_token_ids, *token_ids),
            token_types=None if types is None else (*types, *[0] * len(token_ids)),
        )

    @property
    def num_images(self) -> int:
        """Images of a prompt that text attends to, [1, images, ...]."""
        return self.tensors["pixel_values"].shape[1] if "pixel_values" in self.tensors else 0

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class LaterImages:
    """Images that stand behind the prompt of a row, in what was appended after a turn.

    Args:
        start: Place in the row of the first token of `text`.
        num_skipped: First tokens of `text` that are not appended: they are what stands before it.
        text: A piece of a chat template, with one placeholder for each image.
        images: In order of appearance.
    """

    start: int
    num_skipped: int
    text: str
    images: tuple[ImageSource, ...]

    @property
    def media(self) -> Media:
        """Its images."""
        return Media({"image": self.images})


@dataclass(frozen=True, slots=True)
class RowMedia:
    """The media of the rows of a batch, by reference: selecting rows copies no tensor.

    Args:
        prompts: Of each row; None for rows without media.
        present: Kinds that some rank has among the rows of this forward pass; every rank then runs
            its vision tower once for each.
    """

    prompts: tuple[EncodedPrompt | None, ...] = ()
    present: frozenset[MediumKind] = frozenset()

    @property
    def kinds(self) -> frozenset[MediumKind]:
        """Kinds of these rows."""
        return frozenset(kind for prompt in self.prompts if prompt for kind in prompt.kinds)

    def of_rows(self, num_rows: int) -> tuple[EncodedPrompt | None, ...]:
        """Of each of the rows; a batch without media need not name them."""
        return self.prompts or (None,) * num_rows

    @property
    def is_empty(self) -> bool:
        """Whether neither these rows nor those of other ranks have media."""
        return not self.kinds and not self.present

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.prompts[rows], self.present)


NO_MEDIA = RowMedia()
