"""A tiny model that hears, sounds, and batches of rows with and without them."""

from pathlib import Path

import numpy as np
from tests.models.vision import tiny_world
from tests.models.vision.tiny_world import Batch, twin_of

from lightrft.engines.media.media import Media
from lightrft.engines.media.sounds import as_audio
from lightrft.engines.types import MediaBounds
from lightrft.tools.tiny_media_models import build_tiny

RATE = 16_000


def tone(seconds=1.0, hertz=440, rate=RATE, loudness=0.5):
    """[samples] float32 of a sine."""
    times = np.arange(round(seconds * rate)) / rate
    return (loudness * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def sound(seconds=1.0, seed=0, rate=RATE):
    """Noise, which differs in every band."""
    noise = np.random.default_rng(seed).normal(0, 0.2, round(seconds * rate))
    return as_sound(noise.astype(np.float32), rate, f"sound {seed}")


def as_sound(samples, rate=RATE, name="a sound"):
    return as_audio({"array": samples, "sampling_rate": rate}, name=name, folder=Path())


def tiny(seconds=2):
    return twin_of(build_tiny, preset="tiny-qwen2-audio", seconds=seconds)


def heard(encoder, *sounds):
    return encoder.fitted(Media({"audio": sounds}), MediaBounds())


def prompt(encoder, text, num_sounds=0):
    return tiny_world.prompt(encoder, text, num_sounds=num_sounds)


def encoded_prompts(encoder):
    """One sound, none, two of other lengths."""
    text = prompt(encoder, "plain text")
    return (
        encoder.encode(prompt(encoder, "How high?", 1), heard(encoder, sound(1.0))),
        tuple(encoder.processor.tokenizer(text, add_special_tokens=False)["input_ids"]),
        encoder.encode(
            prompt(encoder, "Which is louder?", 2), heard(encoder, sound(0.31, 1), sound(1.7, 2))
        ),
    )


def batch_of(model, encoder, **options):
    prompts = options.pop("prompts", None) or encoded_prompts(encoder)
    return Batch(model, encoder, prompts=prompts, **options)
