"""Reader of images and videos in a model's prompts and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.config import ConfigError, MediaOptions, RowDataOptions
from lightrft.datasets.media import Modality, TextModality, VisionPrompts
from lightrft.engines.media.families import family_of
from lightrft.models.loading import chosen_template, load_config, load_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def load_modality(config: RowDataOptions, tokenizer: PreTrainedTokenizerBase) -> Modality:
    """Return the reader of prompts for the trained model.

    Raises:
        ConfigError: An option does not fit the model.
        ModelLoadError: The model has no processor.
    """
    family = family_of(load_config(str(config.pretrain)))
    if family is None:
        return TextModality(tokenizer)
    from lightrft.engines.media.encoder import PromptEncoder  # where a model reads media

    processor = load_processor(str(config.pretrain))
    template = chosen_template(config, processor.chat_template) if processor.chat_template else None
    processor.chat_template = template or tokenizer.chat_template
    limit_pixels(processor, config)
    return VisionPrompts(PromptEncoder(processor, family))


# How often a processor's size counts each pixel: GLM-4V's is the size of two frames.
_PIXEL_COUNTS = {"Qwen": 1, "Glm4v": 2}


def limit_pixels(processor: ProcessorMixin, config: MediaOptions) -> None:
    """Set the sizes to which a processor scales media; they are saved with the model."""
    name = type(processor).__name__
    counts = next((n for family, n in _PIXEL_COUNTS.items() if name.startswith(family)), None)
    limits = {"longest_edge": config.max_pixels, "shortest_edge": config.min_pixels}
    wanted = {edge: value * (counts or 0) for edge, value in limits.items() if value is not None}
    if not wanted:
        return
    size = dict(processor.image_processor.size)
    if set(size) != {"longest_edge", "shortest_edge"} or counts is None:
        raise ConfigError(
            f"max_pixels and min_pixels are of the Qwen-VL families and GLM-4V: {name} "
            "scales images to sizes of its own; leave them out"
        )
    processor.image_processor.size = {**size, **wanted}
    if config.max_pixels is not None:
        # Frames are scaled to whole patches before; the processor must not enlarge them again.
        frames = processor.video_processor
        lowest = min(int(frames.size["shortest_edge"]), config.max_pixels // 4)
        frames.size = {**dict(frames.size), "shortest_edge": lowest}
