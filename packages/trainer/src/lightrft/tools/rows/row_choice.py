"""Choices among the recorded samples of a run: the best, the right ones, pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded sample without its tokens.

    Args:
        place: Of its line in the file, which orders and names samples.
        prompt, response: Hashes of their token ids, of the prompt also of its media.
        reward, accuracy: See `RecordedRollout`.
        is_truncated: It has no end that could be learned.
        excluded: Why no row may hold it, a name in `FATES`; "" if one may.
    """

    place: int
    prompt: bytes
    response: bytes
    reward: float
    accuracy: float
    is_truncated: bool = False
    excluded: str = ""


# What becomes of a sample, each of one; the numbers add up to those that were sampled.
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
    """The chosen sample of a row, and the worse one of a pair."""

    chosen: Sample
    rejected: Sample | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to choose among the samples of one prompt.

    Args:
        makes_pairs: Each row has a chosen and a rejected sample.
        by_threshold: The chosen are right and the rejected wrong; else the best and the worst.
        takes_truncated: Also those may be chosen that have no end.
        is_labelled: Each row says whether its sample is right; a right one needs an end.
        max_per_prompt: Rows of a prompt unless told otherwise; None is no bound.
    """

    makes_pairs: bool = False
    by_threshold: bool = False
    takes_truncated: bool = False
    max_per_prompt: int | None = 1
    is_labelled: bool = False

    @property
    def uses_threshold(self) -> bool:
        """Whether it asks what is right."""
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
    """The rows, prompts in the order of their first samples.

    Args:
        samples: In the order of their places. Those with equal prompt ids are of one prompt,
            whatever their steps.
        choice: Among the samples of each prompt; of equal rewards the earlier sample comes first.
        threshold: A sample is right from this accuracy on.
        max_per_prompt: Rows of a prompt; None is no bound.
    """
    by_prompt: dict[bytes, list[Sample]] = {}
    for sample in samples:
        if not sample.excluded:
            by_prompt.setdefault(sample.prompt, []).append(sample)
    rows: list[ChosenSamples] = []
    for own in by_prompt.values():
        rows += _rows_of(own, choice, threshold)[:max_per_prompt]
    return rows


def _rows_of(samples: Sequence[Sample], choice: Choice, threshold: float) -> list[ChosenSamples]:
    """All rows of a prompt, best first."""

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
    # From both ends, as long as rewards differ: no sample is on both sides.
    return [
        ChosenSamples(good, bad)
        for good, bad in zip(chosen, rejected, strict=False)
        if good.reward > bad.reward
    ]


def count_fates(samples: Iterable[Sample], rows: Sequence[ChosenSamples]) -> dict[str, int]:
    """Samples by what became of them: each name of `FATES`."""
    fates = {row.chosen.place: "chosen" for row in rows}
    fates |= {row.rejected.place: "rejected" for row in rows if row.rejected is not None}
    counts = Counter(
        fates.get(each.place) or each.excluded or ("truncated" if each.is_truncated else "left")
        for each in samples
    )
    return {name: counts[name] for name in FATES}
