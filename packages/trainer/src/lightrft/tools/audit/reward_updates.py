"""Objective of a reward model on pairs, rankings, labels, scores or labelled steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as log_sigmoid

from lightrft.tools.audit.models import Scorer
from lightrft.tools.audit.pairs import Borders, Pair, with_rounding
from lightrft.tools.audit.record import Flags, RecordError
from lightrft.tools.audit.replay import ReplayedStep
from lightrft.tools.audit.stored_rows import items_of
from lightrft.tools.audit.updates import LossTerm, ReplayedLoss, Update, trained_model

RANK, MARGIN, TARGET = "rank", "margin", "target"
Settings = Mapping[str, float]


def bradley_terry(d: Tensor, is_tie: Tensor, settings: Settings) -> Tensor:
    """Follow Ouyang et al. 2022, arXiv:2203.02155, eq. 1; ties draw scores together."""
    return torch.where(is_tie, settings["tie_coef"] * d.abs(), -log_sigmoid(d))


def hps(d: Tensor, is_tie: Tensor, settings: Settings) -> Tensor:
    """Follow Wu et al. 2023, arXiv:2306.09341: cross-entropy of two scores at a temperature."""
    return torch.where(is_tie, settings["tie_coef"] * d.abs(), -log_sigmoid(settings["scale"] * d))


def rao_kupper(d: Tensor, is_tie: Tensor, settings: Settings) -> Tensor:
    """Follow Rao and Kupper 1967 with theta = e^w: ties have the remaining probability."""
    w = settings["tie_width"]
    better, worse = log_sigmoid(d - w), log_sigmoid(-d - w)
    return torch.where(is_tie, -better - worse - math.log(math.expm1(2 * w)), -better)


def mse(scores: Tensor, targets: Tensor, _: Settings) -> Tensor:
    """Return the squared distance from the target."""
    return (scores - targets) ** 2


def bce(scores: Tensor, targets: Tensor, _: Settings) -> Tensor:
    """Return the cross-entropy of a probability s(score)."""
    return -targets * log_sigmoid(scores) - (1 - targets) * log_sigmoid(-scores)


# Loss of differences and ties, or of scores and targets.
Function = Callable[[Tensor, Tensor, Settings], Tensor]


@dataclass(frozen=True, slots=True)
class RewardLoss:
    """Built-in loss and its options."""

    function: Function
    defaults: Settings


_TIES = {"tie_coef": 0.01}
REWARD_LOSSES: Mapping[str, RewardLoss] = {
    "bradley_terry": RewardLoss(bradley_terry, _TIES),
    "hps": RewardLoss(hps, {**_TIES, "scale": 1 / 0.07}),
    "rao_kupper": RewardLoss(rao_kupper, {"tie_width": 0.5}),
    "mse": RewardLoss(mse, {}),
    "bce": RewardLoss(bce, {}),
}
# Names in other libraries.
OTHER_NAMES = {"sigmoid": "bradley_terry", "logexp": "bradley_terry"}


def score_places(step: ReplayedStep) -> Flags:
    """Return the last token of each answer or labelled step: [rows, seq] bool."""
    facts, rows = step.record.samples.facts, step.rows
    num_rows, num_tokens = len(rows.lengths), int(rows.lengths.sum())
    sizes = {name: len(facts[name]) for name in (RANK, TARGET) if name in facts}
    if list(sizes.values()) == [num_tokens] and TARGET in sizes:
        return rows.mask
    if list(sizes.values()) != [num_rows]:
        raise RecordError(f"{step.record.folder} does not say how its answers were judged")
    return np.asarray(np.arange(rows.ids.shape[1])[None, :] == rows.lengths[:, None] - 1)


class RewardReplay(ReplayedLoss):
    """Loss of a reward model.

    Args:
        step: Step under audit.
        scorer: Plain model of the reward model.
    """

    scores = "scores"

    def __init__(self, step: ReplayedStep, scorer: Scorer) -> None:
        self._facts = step.record.samples.facts
        name = step.config.reward_loss or ("bradley_terry" if RANK in self._facts else "bce")
        self._loss = REWARD_LOSSES.get(OTHER_NAMES.get(name, name))
        ended = f"reward loss {name} is the caller's own" if self._loss is None else ""
        super().__init__(step, scorer, ended)

    def denominator(self, mask: Tensor) -> float:
        """Return the number of items, or of labels."""
        is_compared = RANK in self._facts
        return float(self.step.config.train_batch_size if is_compared else mask.sum())

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[LossTerm]:
        """Yield the loss of comparisons or labels."""
        mask, loss = update.mask, self._loss
        assert loss is not None  # a user-defined loss is not replayed
        args = self.step.config.reward_loss_args or {}
        options = {n: float(args.get(n, value)) for n, value in loss.defaults.items()}
        values = self._compared if RANK in self._facts else self._labelled

        def total(new: Pair, _: Borders) -> Tensor:
            return values(new.exact[mask], loss.function, options) / self.denominator(mask)

        signs = torch.ones_like(error)
        signs[mask] = 2.0 * (torch.arange(int(mask.sum())) % 2).double() - 1.0
        shifts = (error, -error, signs * error, -signs * error)
        yield LossTerm("policy", 1.0, *with_rounding(total, scores, shifts, self.step.borders))

    def _labelled(self, scores: Tensor, function: Function, settings: Settings) -> Tensor:
        targets = self._facts[TARGET].astype(np.float64)
        if len(targets) != len(scores):
            targets = self.step.rows.padded(targets)[self.step.rows.mask]
        return function(scores, torch.from_numpy(targets), settings)

    def _compared(self, scores: Tensor, function: Function, settings: Settings) -> Tensor:
        """Return losses of all answer pairs; the pairs of one prompt have a total weight of 1."""
        first, second, weights = self._pairs()
        ranks = torch.from_numpy(self._facts[RANK])
        margins = self._facts.get(MARGIN, np.zeros(len(ranks))).astype(np.float64)
        d = scores[first] - scores[second] - torch.from_numpy(margins)[first]
        values = function(d, ranks[first] == ranks[second], settings)
        centering = self.step.config.centering_coef * (scores[first] + scores[second]) ** 2
        return torch.tensor(weights, dtype=torch.float64) * (values + centering)

    def _pairs(self) -> tuple[list[int], list[int], list[float]]:
        """Return the better and the other answer of each pair, and the pair's weight."""
        items, ranks = items_of(self.step), self._facts[RANK]
        edges = [n for n in range(len(items)) if n == 0 or items[n] != items[n - 1]]
        first, second, weights = list[int](), list[int](), list[float]()
        for start, stop in pairwise([*edges, len(items)]):
            both = [
                (i, j) if ranks[i] <= ranks[j] else (j, i)
                for i in range(start, stop)
                for j in range(i + 1, stop)
            ]
            first += [i for i, _ in both]
            second += [j for _, j in both]
            weights += [1 / len(both)] * len(both)
        return first, second, weights


def reward_objectives(step: ReplayedStep, _: Path | None) -> dict[str, ReplayedLoss]:
    """Return the objective of the reward model."""
    return {"actor": RewardReplay(step, trained_model(step))}
