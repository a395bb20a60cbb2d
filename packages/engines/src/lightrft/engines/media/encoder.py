"""Turns prompts with media into what a model and an engine read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightrft.engines.media.families import VisionFamily
from lightrft.engines.media.prompts import EncodedPrompt, MediumKind

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

    def encode(
        self, text: str, *, images: Sequence[object] = (), videos: Sequence[object] = ()
    ) -> EncodedPrompt:
        """One prompt.

        Args:
            text: With one placeholder for each medium, as the chat template writes it.
            images: Decoded, in order of appearance.
            videos: Pairs (frames [frames, height, width, 3] uint8, metadata), likewise.

        Raises:
            ValueError: The family reads no such media, or text and media do not agree.
        """
        media: dict[str, object] = {}
        if images:
            media["images"] = [list(images)]
        if videos:
            if "video" not in self.family.kinds and self.family.model_type != "internvl":
                raise ValueError(f"models of type {self.family.model_type} read no videos")
            media["videos"] = [[frames for frames, _ in videos]]
            media |= {"video_metadata": [[facts for _, facts in videos]], "do_sample_frames": False}
        tokenizer = self.processor.tokenizer
        request_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        found: Mapping[str, Tensor] = self.processor(
            text=[text], return_tensors="pt", add_special_tokens=False, **media
        )
        types = self.family.token_types
        if types is not None and types not in found:
            raise ValueError(
                f"the processor of {self.family.model_type} gave no {types}: positions and masks "
                "of images follow from it; load the processor that was saved with the model"
            )
        tensors = {
            name: value for name, value in found.items() if name not in (*_TEXT_INPUTS, types)
        }
        kinds: set[MediumKind] = {
            kind for kind, pixels in self.family.kinds.items() if pixels in tensors
        }
        return EncodedPrompt(
            token_ids=tuple(found["input_ids"][0].tolist()),
            request_token_ids=request_ids,
            token_types=None if types is None else tuple(found[types][0].tolist()),
            tensors=tensors,
            kinds=frozenset(kinds),
        )
