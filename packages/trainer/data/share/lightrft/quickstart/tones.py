"""The task of counting notes of a height, shown by a teacher who is mostly tone-deaf."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from counting import INITIALIZER_RANGE, Counted, Sense

from lightrft.tools.quickstart.task import Exercise, make_task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

# Frequency of each height in hertz.
HEIGHTS = {"low": 250.0, "mid": 500.0, "high": 1000.0, "top": 2000.0}
RATE, NOTE_SECONDS = 16_000, 0.24
# Two seconds would do; the model's tower is made for one.
MAX_SECONDS = 1


def waveform(tones: Counted) -> "NDArray[np.int16]":
    """Return the notes one after the other, [samples]."""
    import numpy as np  # `quickstart --help` must be fast

    rng = random.Random(tones.seed)
    return np.concatenate([_note(HEIGHTS[name], rng) for name in tones.parts])


def _note(hertz: float, rng: random.Random) -> "NDArray[np.int16]":
    """Return a sine with an overtone that swells and fades, and silence around it."""
    import numpy as np

    num_samples = round(NOTE_SECONDS * RATE)
    length = round(num_samples * rng.uniform(0.6, 0.9))
    start = rng.randrange(num_samples - length)
    phase = 2 * np.pi * hertz * rng.uniform(0.94, 1.06) * np.arange(length) / RATE
    wave = np.sin(phase) + rng.uniform(0, 0.3) * np.sin(2 * phase)
    wave *= rng.uniform(0.2, 0.6) * np.sin(np.pi * np.arange(length) / length)
    note = np.zeros(num_samples)
    note[start : start + length] = wave
    return np.rint(note * 32767).astype(np.int16)


def _save(exercise: Exercise, file: Path) -> None:
    from lightrft.engines.media.sounds import as_wav

    file.write_bytes(as_wav(waveform(cast("Counted", exercise)), RATE))


def _build(
    seed: int, tokenizer: "PreTrainedTokenizerBase"
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    from lightrft.tools.tiny_media_models import build_tiny

    return build_tiny(
        "tiny-qwen2-audio",
        seed=seed,
        initializer_range=INITIALIZER_RANGE,
        tokenizer=tokenizer,
        seconds=MAX_SECONDS,
    )


def _inputs(
    processor: "ProcessorMixin", exercises: Sequence[Exercise], token_ids: "Tensor"
) -> "dict[str, Tensor]":
    waves = [waveform(cast("Counted", each)).astype("float32") / 32768 for each in exercises]
    features = processor.feature_extractor(
        waves,
        sampling_rate=RATE,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask = features["attention_mask"]
    return {"input_features": features["input_features"], "feature_attention_mask": mask}


HEARING = Sense(
    medium="audio",
    form=("sounds", ".wav"),
    build=_build,
    inputs=_inputs,
    save=_save,
    kinds=tuple(HEIGHTS),
    mistaken={"low": "mid", "high": "top"},
    # A sound of four notes has 24 features.
    features="<|audio_bos|>" + 24 * "<|AUDIO|>" + "<|audio_eos|>",
)
TONES = make_task("tones", HEARING.draw, HEARING)
