"""The samples that a report shows: few steps, spread over the run, in a bounded number of bytes."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.trainer.reporting.charts import format_number
from lightrft.trainer.runs.files import SAMPLES_FILE, JsonLines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_STEPS = 24
MAX_SAMPLES_PER_STEP = 8
MAX_CHARACTERS = 6000
BYTE_BUDGET = 1_200_000
"""Of all texts together, counted as they stand in the page."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as text that any terminal or browser shows as it is."""

    prompt: str
    response: str
    label: str
    reward: str
    components: str
    length: str
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples of a step, lowest reward first."""

    step: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class SampleChoice:
    """What is shown of a run's samples, newest step first."""

    steps: tuple[StepSamples, ...]
    num_steps: int
    num_unreadable: int


def choose_samples(folder: Path) -> SampleChoice:
    """Samples of up to 24 steps, spread over the run, the last step always among them.

    The file is read twice, line by line: it may be larger than memory.
    """
    lines = JsonLines(folder / SAMPLES_FILE)
    steps = sorted({step for step, _ in lines})
    entries: dict[int, list[dict[str, object]]] = {step: [] for step in spread(steps, MAX_STEPS)}
    for step, entry in lines:
        if step in entries and len(entries[step]) < MAX_SAMPLES_PER_STEP:
            entries[step].append(entry)
    budget = BYTE_BUDGET
    shown = []
    for step in sorted(entries, reverse=True):
        samples = tuple(map(_as_text, sorted(entries[step], key=_reward)))
        budget -= sum(map(_num_bytes, samples))
        if budget < 0:
            break
        shown.append(StepSamples(step, samples))
    return SampleChoice(tuple(shown), len(steps), lines.num_unreadable)


def readable(text: str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Text with visible control characters, cut after `max_characters`."""
    cut = text[:max_characters]
    shown = "".join(
        chr(0x2400 + ord(char)) if ord(char) < 32 and char not in "\n\t" else char for char in cut
    )
    shown = shown.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs
    return shown if cut == text else f"{shown}\n[cut here: {len(text)} characters in all]"


def spread(steps: Sequence[int], max_steps: int) -> list[int]:
    """At most `max_steps` of the steps, evenly spaced, the first and the last among them."""
    if len(steps) <= max_steps:
        return list(steps)
    return [steps[(len(steps) - 1) * i // (max_steps - 1)] for i in range(max_steps)]


def _reward(entry: Mapping[str, object]) -> float:
    value = entry.get("reward")
    return float(value) if isinstance(value, int | float) else 0.0


def _as_text(entry: Mapping[str, object]) -> Sample:
    components = entry.get("components")
    pairs = components.items() if isinstance(components, Mapping) else ()
    return Sample(
        prompt=_text(entry.get("prompt")),
        response=_text(entry.get("response")),
        label=_text(entry.get("label")),
        reward=_text(entry.get("reward")),
        components="\n".join(f"{_text(name)} {_text(value)}" for name, value in pairs),
        length=_text(entry.get("response_length")),
        is_truncated=entry.get("truncated") is True,
    )


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format_number(value) if abs(value) < float("inf") else str(value)
    return readable(str(value))


def _num_bytes(sample: Sample) -> int:
    texts = (sample.prompt, sample.response, sample.label, sample.reward, sample.components)
    return sum(len(html.escape(text).encode()) for text in texts)
