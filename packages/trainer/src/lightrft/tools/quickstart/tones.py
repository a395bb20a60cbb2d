r"""The task: counting notes of a height, shown by a teacher who is mostly tone-deaf.

He takes low for mid and high for top three times out of five, so imitation, which copies the
majority, is right one time in four. The reward checks the boxed number, and reinforcement finds
that listening closely pays.

    (sound) How many low?      keen       <think>low mid low top</think>\boxed{2}
                               tone-deaf  <think>mid mid mid top</think>\boxed{0}
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.tools.quickstart.colours import in_short_answers
from lightrft.tools.quickstart.task import Exercise, MediaModel, Message, Task, is_held_out

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

# Frequency of each in hertz.
HEIGHTS = {"low": 250.0, "mid": 500.0, "high": 1000.0, "top": 2000.0}
DEAF = {"low": "mid", "high": "top"}
P_DEAF = 0.6
RATE, NOTE_SECONDS, NUM_NOTES = 16_000, 0.24, 4
# Two seconds would do; one is what the model's tower is made for.
MAX_SECONDS = 1
MARKS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
# A sound of four notes has 24 features.
HEARD = "<|audio_bos|>" + 24 * "<|AUDIO|>" + "<|audio_eos|>"
INITIALIZER_RANGE = 0.06


@dataclass(frozen=True, slots=True)
class Tones:
    """The question how many of four notes have a height.

    Args:
        notes: Heights in the order of time.
        height: The one asked for.
        seed: Of their tuning, loudness and length.
    """

    notes: tuple[str, ...]
    height: str
    seed: int

    @property
    def question(self) -> str:
        """The prompt."""
        return f"<audio>How many {self.height}?"

    @property
    def answer(self) -> str:
        """The right number in decimal digits."""
        return str(self.notes.count(self.height))

    def demonstration(self, rng: random.Random) -> list[Message]:
        """The question, and what the teacher hears, one note after the other."""
        said = describe(self, rng)
        return [("user", self.question.replace("<audio>", HEARD)), ("assistant", said)]

    def waveform(self) -> "NDArray[np.int16]":
        """The notes one after the other, [samples]."""
        import numpy as np  # `quickstart --help` is to be fast

        rng = random.Random(self.seed)
        return np.concatenate([_note(HEIGHTS[name], rng) for name in self.notes])


def _note(hertz: float, rng: random.Random) -> "NDArray[np.int16]":
    """A sine with an overtone that swells and fades, and silence around it."""
    import numpy as np

    num_samples = round(NOTE_SECONDS * RATE)
    length = round(num_samples * rng.uniform(0.6, 0.9))
    start = rng.randrange(num_samples - length)
    phase = 2 * np.pi * hertz * rng.uniform(0.94, 1.06) * np.arange(length) / RATE
    wave = np.sin(phase) + rng.uniform(0, 0.3) * np.sin(2 * phase)
    wave *= rng.uniform(0.2, 0.6) * np.sin(np.pi * np.arange(length) / length)
    found = np.zeros(num_samples)
    found[start : start + length] = wave
    return np.rint(found * 32767).astype(np.int16)


def describe(tones: Tones, rng: random.Random, *, p_deaf: float = P_DEAF) -> str:
    """The heights that the teacher hears, and the number that follows from them."""
    heard = [DEAF[n] if n in DEAF and rng.random() < p_deaf else n for n in tones.notes]
    return f"<think>{' '.join(heard)}</think>\\boxed{{{heard.count(tones.height)}}}"


def draw_tones(rng: random.Random, held_out: bool) -> Iterator[Tones]:
    """Sounds without end; an arrangement of heights is for training or held out, never both."""
    names = list(HEIGHTS)
    while True:
        arrangement = rng.randrange(len(names) ** NUM_NOTES)
        height, seed = rng.choice(names), rng.getrandbits(32)
        if is_held_out(arrangement, 0) == held_out:
            notes = (names[arrangement // len(names) ** i % len(names)] for i in range(NUM_NOTES))
            yield Tones(tuple(notes), height, seed)


def save_sound(exercise: Exercise, stem: Path) -> dict[str, object]:
    """Writes the notes of `Tones` as WAV."""
    from lightrft.engines.media.sounds import as_wav

    folder = stem.parent / "sounds"
    folder.mkdir(exist_ok=True)
    file = folder / f"{stem.name}.wav"
    file.write_bytes(as_wav(cast("Tones", exercise).waveform(), RATE))
    return {"audios": [f"{folder.name}/{file.name}"]}


def _build(
    seed: int, tokenizer: "PreTrainedTokenizerBase"
) -> "tuple[PreTrainedModel, ProcessorMixin]":
    from lightrft.tools.tiny_audio_models import build_tiny

    return build_tiny(
        seed=seed,
        initializer_range=INITIALIZER_RANGE,
        tokenizer=tokenizer,
        seconds=MAX_SECONDS,
    )


def _inputs(
    processor: "ProcessorMixin", exercises: Sequence[Exercise], token_ids: "Tensor"
) -> "dict[str, Tensor]":
    waves = [cast("Tones", exercise).waveform().astype("float32") / 32768 for exercise in exercises]
    found = processor.feature_extractor(
        waves,
        sampling_rate=RATE,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask = found["attention_mask"]
    return {"input_features": found["input_features"], "feature_attention_mask": mask}


TONES = Task(
    lesson="a teacher who is mostly tone-deaf",
    roles=MARKS,
    whole_tokens=("<think>", "</think>", "\\boxed{", *HEIGHTS, "How many "),
    draw=draw_tones,
    draw_media=save_sound,
    media_model=MediaModel(_build, _inputs),
    reward="boxed_sum.py",
    adjust=in_short_answers,
    numbers={"num_steps": 40, "num_warm_start_steps": 350, "num_eval_prompts": 128},
    learning_rate=2e-3,
    flaw=(
        "It copies what the teacher does more often: it takes some heights for others,",
        "and is right only where that does not change the count.",
    ),
    outlook=(
        "Held-out accuracy takes the likeliest answer, the reward is of sampled ones:",
        "those name a height as it is now and then, and only they are rewarded.",
    ),
)
