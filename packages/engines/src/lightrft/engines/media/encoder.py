"""Turns prompts with media into what a model and an engine read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightrft.engines.media.families import VisionFamily
from lightrft.engines.media.prompts import EncodedPrompt, MediumKind
from lightrft.engines.media.sources import ImageSource, VideoSource

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Inputs of text that every processor gives.
_TEXT_INPUTS = ("input_ids", "attention_mask")


class PromptEncoder:
    """Calls a processor once for each prompt.

    Args:
        processor: Of the model.
        family: Of the model.
    """

    def __init__(self, processor: "ProcessorMixin", family: VisionFamily) -> None:
        self.processor = processor
        self.family = family
        self._kept: dict[tuple[str, ...], EncodedPrompt] = {}

    def encode(
        self, text: str, *, images: Sequence[ImageSource] = (), videos: Sequence[VideoSource] = ()
    ) -> EncodedPrompt:
        """One prompt.

        Args:
            text: With one placeholder for each medium, as the chat template writes it.
            images, videos: In order of appearance.

        Raises:
            MediaError: A medium cannot be read.
            ValueError: The family reads no such media, or text and media do not agree.
        """
        clips = [video.decode() for video in videos]
        media: dict[str, object] = {}
        if images:
            media["images"] = [[image.decode() for image in images]]
        if clips:
            if not self.family.reads_videos:
                raise ValueError(f"models of type {self.family.model_type} read no videos")
            media["videos"] = [[frames for frames, _ in clips]]
            media |= {"video_metadata": [[facts for _, facts in clips]], "do_sample_frames": False}
        found: Mapping[str, Tensor] = self.processor(
            text=[text], return_tensors="pt", add_special_tokens=False, **media
        )
        types = self.family.token_types
        if types is not None and types not in found:
            raise ValueError(
                f"the processor of {self.family.model_type} gave no {types}: positions and masks "
                "of images follow from it; load the processor that was saved with the model"
            )
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        tensors = {
            name: value for name, value in found.items() if name not in (*_TEXT_INPUTS, types)
        }
        kinds: set[MediumKind] = {
            kind for kind, pixels in self.family.kinds.items() if pixels in tensors
        }
        return EncodedPrompt(
            token_ids=tuple(found["input_ids"][0].tolist()),
            request_token_ids=tuple(ids),
            token_types=None if types is None else tuple(found[types][0].tolist()),
            tensors=tensors,
            kinds=frozenset(kinds),
            images=tuple(images),
            videos=tuple(videos),
            sizes=self._sizes(),
        )

    def _sizes(self) -> dict[str, dict[str, object]]:
        """Of the families whose images keep their sizes, within bounds that options move."""
        if not self.family.has_axes:
            return {}
        return {"images_kwargs": {"size": dict(self.processor.image_processor.size)}}

    def kept(
        self, text: str, *, images: Sequence[ImageSource] = (), videos: Sequence[VideoSource] = ()
    ) -> EncodedPrompt:
        """Like `encode`, and the same object for the same prompt until `forget`."""
        key = (text, *(i.digest for i in images), *(v.digest for v in videos))
        if key not in self._kept:
            self._kept[key] = self.encode(text, images=images, videos=videos)
        return self._kept[key]

    def forget(self) -> None:
        """Frees the tensors of all prompts."""
        self._kept.clear()
