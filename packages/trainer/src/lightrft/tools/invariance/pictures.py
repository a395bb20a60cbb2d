"""Prompts with pictures for the step of a vision-language model."""

from __future__ import annotations

import io

import numpy as np

from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.engines.media.kinds import Media
from lightrft.engines.media.prompts import EncodedPrompt
from lightrft.engines.media.sources import ImageSource
from lightrft.models.loading import load_config, load_processor

# Width and height of the pictures of each row; ranks and micro-batches differ in having some.
SIZES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((84, 84),),
    (),
    ((112, 56), (56, 84)),
    (),
    (),
    (),
    ((56, 56),),
    (),
)


def draw_prompts(path: str, seed: int) -> tuple[EncodedPrompt | None, ...]:
    """Prompts of the rows that have pictures of noise; () for a model of text.

    Args:
        path: Checkpoint of the model, with its processor.
        seed: Of the noise.
    """
    family = family_of(load_config(path))
    if family is None:
        return ()
    encoder = PromptEncoder(load_processor(path), family)
    rng = np.random.default_rng(seed)
    return tuple(_encode(encoder, sizes, rng) if sizes else None for sizes in SIZES)


def _encode(
    encoder: PromptEncoder, sizes: tuple[tuple[int, int], ...], rng: np.random.Generator
) -> EncodedPrompt:
    from PIL import Image

    images = []
    for width, height in sizes:
        buffer = io.BytesIO()
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        images.append(ImageSource("a picture of noise", content=buffer.getvalue()))
    parts = [*({"type": "image"} for _ in sizes), {"type": "text", "text": "?"}]
    text = encoder.processor.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    return encoder.encode(str(text), Media({"image": images}))
