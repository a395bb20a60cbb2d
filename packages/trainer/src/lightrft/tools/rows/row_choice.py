"""Ways to choose among the recorded samples of a run: the best, the right ones, pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded sample without its tokens.

    Args:
        place: Position of its line in the file, which orders and identifies samples.
        prompt, response: Hashes of their token ids; that of the prompt includes its media.
        reward, accuracy: Values of `RecordedRollout`.
        is_truncated: Whether it lacks an end that could be learned.
        excluded: Key of `FATES` that says why no row may hold it; "" if one may.
    """

    place: int
    prompt: bytes
    response: bytes
    reward: float
    accuracy: float
    is_truncated: bool = False
    excluded: str = ""


# Fates of samples; each sample has one, so their counts add up to the number of samples.
FATES: Mapping[str, str] = {
    "chosen": "in a row",
    "rejected": "in a row of two, as the worse one",
    "left": "not chosen",
    "truncated": "not chosen, and without an end",
    "duplicate": "an earlier sample has the same prompt and response",
    "undecided": "the reward failed or could not be decided",
    "held_out": "the prompt is one of eval_data",
    "with_media": "videos, sounds or images of turns, which rows of token ids do not hold",
    "answered": "an environment wrote parts of it, which pairs and scores do not mark",
}


@dataclass(frozen=True, slots=True)
class ChosenSamples:
    """Chosen sample of a row, and the worse one of a pair."""

    chosen: Sample
    rejected: Sample | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to choose among the samples of one prompt.

    Args:
        makes_pairs: Whether each row has a chosen and a rejected sample.
        by_threshold: Whether right and wrong samples are chosen and rejected; else the best and
            the worst.
        takes_truncated: Whether truncated samples may be chosen.
        is_labelled: Whether each row says if its sample is right; a right one needs an end.
        max_per_prompt: Default number of rows per prompt; None is no bound.
    """

    makes_pairs: bool = False
    by_threshold: bool = False
    takes_truncated: bool = False
    max_per_prompt: int | None = 1
    is_labelled: bool = False

    @property
    def uses_threshold(self) -> bool:
        """Return whether the choice depends on the threshold."""
        return self.by_threshold or self.is_labelled


CHOICES: Mapping[str, Choice] = {
    "best": Choice(),
    "right": Choice(by_threshold=True, max_per_prompt=4),
    "best_worst": Choice(makes_pairs=True),
    "right_wrong": Choice(makes_pairs=True, by_threshold=True),
    "all": Choice(takes_truncated=True, max_per_prompt=None),
    "labelled": Choice(is_labelled=True, max_per_prompt=None),
}
# The choices for each use of the rows, the default first.
USES: Mapping[str, tuple[str, ...]] = {
    "sft": ("right", "best"),
    "best_of_n": ("best",),
    "prefer": ("best_worst", "right_wrong", "labelled"),
    "reward": ("best_worst", "right_wrong", "all"),
}


def choose(
    samples: Iterable[Sample], choice: Choice, *, threshold: float, max_per_prompt: int | None
) -> list[ChosenSamples]:
    """Return the rows, with prompts in the order of their first samples.

    Args:
        samples: Samples in the order of their places. Samples with equal prompt ids belong to one
            prompt, whatever their steps.
        choice: Way to choose among the samples of each prompt; the earlier of equal rewards wins.
        threshold: Least accuracy of a right sample.
        max_per_prompt: Number of rows per prompt; None is no bound.
    """
    by_prompt: dict[bytes, list[Sample]] = {}
    for sample in samples:
        if not sample.excluded:
            by_prompt.setdefault(sample.prompt, []).append(sample)
    rows: list[ChosenSamples] = []
    for prompt_samples in by_prompt.values():
        rows += _rows_of(prompt_samples, choice, threshold)[:max_per_prompt]
    return rows


def _rows_of(samples: Sequence[Sample], choice: Choice, threshold: float) -> list[ChosenSamples]:
    """Return all rows of a prompt, best first."""

    def is_right(sample: Sample) -> bool:
        return sample.accuracy >= threshold

    best_first = sorted(samples, key=lambda each: (-each.reward, each.place))
    chosen = [
        each
        for each in best_first
        if (
            choice.takes_truncated
            or not each.is_truncated
            or (choice.is_labelled and not is_right(each))
        )
        and (not choice.by_threshold or is_right(each))
    ]
    if not choice.makes_pairs:
        return [ChosenSamples(each) for each in chosen]
    worst_first = sorted(samples, key=lambda each: (each.reward, each.place))
    rejected = [each for each in worst_first if not (choice.by_threshold and is_right(each))]
    # Pairs from both ends while rewards differ, so no sample is on both sides.
    return [
        ChosenSamples(good, bad)
        for good, bad in zip(chosen, rejected, strict=False)
        if good.reward > bad.reward
    ]


def count_fates(samples: Iterable[Sample], rows: Sequence[ChosenSamples]) -> dict[str, int]:
    """Return the number of samples with each fate of `FATES`."""
    fates = {row.chosen.place: "chosen" for row in rows}
    fates |= {row.rejected.place: "rejected" for row in rows if row.rejected is not None}
    counts = Counter(
        fates.get(each.place) or each.excluded or ("truncated" if each.is_truncated else "left")
        for each in samples
    )
    return {name: counts[name] for name in FATES}
