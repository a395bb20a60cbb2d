"""Comparisons of scores: the pairs of some rows, and metrics of the scores' agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.algorithms.moments import PairedMoments
from lightrft.datasets.preference_rows import LabelledAnswer, PreferencePair
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.datasets.step_rows import LabelledSteps
from lightrft.stages.metrics import StepMetrics

NUM_BINS = 10
# Prefixes of the names of a bin's share of all comparisons, mean confidence and accuracy.
BINS = ("bin_share/", "bin_confidence/", "bin_accuracy/")
# Lengths whose difference is smaller, relative to the better answer, count as equal.
EVEN_LENGTHS = 0.1
Judgement = PreferencePair | RankedAnswers | LabelledAnswer | LabelledSteps | ScoredAnswer


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Places of compared answers among the rows of some judgements.

    Args:
        better, worse: [pairs] int64.
        margins: [pairs] float64, difference in quality; 0 is unknown.
        is_tie: [pairs] bool, neither answer is better.
        weights: [pairs] float64; the weights of answers to one prompt add up to 1.
    """

    better: Tensor
    worse: Tensor
    margins: Tensor
    is_tie: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls, judgements: Sequence[Judgement], device: torch.device, name: str = ""
    ) -> Comparisons:
        """Return the comparisons of judgements: all pairs of a ranking, none of a label.

        Args:
            judgements: Judgements of one kind.
            device: Device of the results.
            name: Name of the score whose rankings count; "" is the only one.
        """
        rows: list[tuple[int, int, float, bool, float]] = []
        start = 0
        for each in judgements:
            if isinstance(each, PreferencePair):
                rows.append((start, start + 1, each.margin or 0.0, False, 1.0))
            elif isinstance(each, RankedAnswers):
                ranks = each.ranks_of(name)
                pairs = list(combinations(sorted(range(len(ranks)), key=ranks.__getitem__), 2))
                rows += [
                    (start + a, start + b, 0.0, ranks[a] == ranks[b], 1 / len(pairs))
                    for a, b in pairs
                ]
            start += len(each.rows)
        columns = torch.tensor(rows, dtype=torch.float64, device=device).view(-1, 5).unbind(1)
        better, worse, margins, is_tie, weights = columns
        return cls(better.long(), worse.long(), margins, is_tie.bool(), weights)

    def differences(self, scores: Tensor) -> Tensor:
        """Return [pairs] score of the better answer - score of the other."""
        return scores[self.better] - scores[self.worse]


def judgement_facts(judgements: Sequence[Judgement]) -> dict[str, NDArray[np.float64]]:
    """Return facts of the data about the rows of some judgements, for observers.

    Returns:
        For pairs and rankings `rank` [rows], smaller is better; for pairs also `margin` [rows]; for
        answers `target` [rows], for steps [tokens] at their ends.
    """
    facts: dict[str, list[float]] = {"rank": [], "margin": [], "target": []}
    for each in judgements:
        if isinstance(each, PreferencePair):
            facts["rank"] += [1.0, 2.0]
            facts["margin"] += [each.margin or 0.0] * 2
        elif isinstance(each, RankedAnswers):
            facts["rank"] += each.ranks
        elif isinstance(each, LabelledSteps):
            ends = np.zeros(len(each.answer.token_ids))
            ends[each.answer.is_trained] = each.labels
            facts["target"] += ends.tolist()
        else:
            facts["target"].append(each.score if isinstance(each, ScoredAnswer) else each.is_good)
    return {name: np.array(values, np.float64) for name, values in facts.items() if values}


@torch.no_grad()
def record_scores(metrics: StepMetrics, scores: Tensor, lengths: Tensor) -> None:
    """Record metrics of some rows' scores.

    Args:
        metrics: Receives the metrics.
        scores: [rows] float64.
        lengths: [rows] tokens.
    """
    everything = torch.ones_like(scores, dtype=torch.bool)
    metrics.add_mean("score", scores.sum(), len(scores))
    metrics.add_pairs("score_std", scores, lengths, everything, _first_deviation)
    metrics.add_pairs(
        "length_correlation", scores, lengths, everything, lambda moments: moments.correlation
    )


@torch.no_grad()
def record_comparisons(
    metrics: StepMetrics, scores: Tensor, lengths: Tensor, comparisons: Comparisons, name: str = ""
) -> None:
    """Record how well scores agree with comparisons; several scores share the metrics.

    Args:
        metrics: Receives the metrics.
        scores, lengths: See `record_scores`.
        comparisons: Comparisons of these rows.
        name: Name of the score, whose accuracy is also shown alone; "" is the only one.
    """
    weights = comparisons.weights * ~comparisons.is_tie
    differences, longer = map(comparisons.differences, (scores, lengths.double()))
    metrics.add_mean("longer_accuracy", (weights * _wins(longer)).sum(), weights.sum())
    even = weights * (longer.abs() <= EVEN_LENGTHS * lengths[comparisons.better])
    metrics.add_mean("even_accuracy", (even * _wins(differences)).sum(), even.sum())
    record_agreement(metrics, differences, weights)
    if name:
        wins = (weights * _wins(differences)).sum()
        metrics.add_mean(f"head_accuracy/{name}", wins, weights.sum())


@torch.no_grad()
def record_agreement(metrics: StepMetrics, differences: Tensor, weights: Tensor) -> None:
    """Record metrics of logits d, where sigmoid(d) is the probability of the right outcome.

    Args:
        metrics: Receives the metrics.
        differences, weights: [pairs] float64.
    """
    is_right = _wins(differences)
    metrics.add_mean("accuracy", (weights * is_right).sum(), weights.sum())
    metrics.add_mean("score_margin", (weights * differences).sum(), weights.sum())
    confidence = differences.abs().sigmoid()
    places = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    columns = torch.stack([weights, weights * confidence, weights * is_right])
    bins = torch.zeros(3, NUM_BINS, dtype=torch.float64, device=differences.device)
    bins.index_add_(1, places, columns)
    metrics.add_sums("calibration_error", bins.flatten().unbind(), calibration_error)
    for place in range(NUM_BINS):
        # Named by the least confidence of the bin in percent.
        name = 50 + place * 50 // NUM_BINS
        metrics.add_mean(f"{BINS[0]}{name}", bins[0, place], weights.sum())
        metrics.add_mean(f"{BINS[1]}{name}", bins[1, place], bins[0, place])
        metrics.add_mean(f"{BINS[2]}{name}", bins[2, place], bins[0, place])


def _wins(differences: Tensor) -> Tensor:
    """Return 1 where positive, 1/2 where 0."""
    return (differences.sign() + 1) / 2


def calibration_error(sums: Tensor) -> float | None:
    """Return the expected calibration error: the mean over bins of |confidence - accuracy|.

    Args:
        sums: [3 * bins] weight, summed confidence and summed right outcomes of each bin.

    Source: Guo et al. 2017, arXiv:1706.04599, eq. 5.
    """
    weights, confidence, is_right = sums.view(3, -1)
    total = weights.sum()
    return float((confidence - is_right).abs().sum() / total) if total > 0 else None


def _first_deviation(moments: PairedMoments) -> float | None:
    return math.sqrt(moments.squares[0] / moments.count) if moments.count else None
