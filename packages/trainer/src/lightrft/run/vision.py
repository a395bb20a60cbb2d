"""What a run needs for a vision-language model before the model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.models.loading import load_config, load_processor, load_tokenizer

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def load_vision(config: TrainConfig) -> VisionPrompts | None:
    """What reads prompts with images for the model that is trained; None for models of text.

    Raises:
        ConfigError: An option does not fit the model.
        ModelLoadError: It has no processor.
    """
    family = family_of(load_config(str(config.pretrain)))
    if family is None:
        return None
    processor = load_processor(str(config.pretrain))
    if config.chat_template is not None:
        tokenizer = load_tokenizer(str(config.pretrain), chat_template=config.chat_template)
        processor.chat_template = tokenizer.chat_template
    limit_pixels(processor, config)
    return VisionPrompts(PromptEncoder(processor, family))


def limit_pixels(processor: ProcessorMixin, config: TrainConfig) -> None:
    """Sets the sizes to which a processor scales media; it is saved with the model."""
    given = {"longest_edge": config.max_pixels, "shortest_edge": config.min_pixels}
    wanted = {name: value for name, value in given.items() if value is not None}
    if not wanted:
        return
    size = dict(processor.image_processor.size)
    if set(size) != {"longest_edge", "shortest_edge"} or "Qwen" not in type(processor).__name__:
        raise ConfigError(
            f"max_pixels and min_pixels are of the Qwen-VL families: {type(processor).__name__} "
            "scales images to sizes of its own; leave them out"
        )
    processor.image_processor.size = {**size, **wanted}
