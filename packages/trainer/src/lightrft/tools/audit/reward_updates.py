"""The update of a reward model on pairs, rankings, labels, scores or labelled steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lightrft.config import TrainConfig
from lightrft.tools.audit.corrections import Pair
from lightrft.tools.audit.given_rows import (
    check_given,
    differentiated,
    in_items,
    items_of,
    log_sigmoid,
    sizes_of,
)
from lightrft.tools.audit.losses import Term
from lightrft.tools.audit.models import Classifier, Scorer
from lightrft.tools.audit.record import Array, Flags, Integers, RecordError
from lightrft.tools.audit.replay import Step
from lightrft.tools.audit.updates import Slopes, StageAudit, Update, Updates, trained_model

RANK, MARGIN, TARGET = "rank", "margin", "target"
Given = Mapping[str, float]


def _preferred(d: Array, scale: float, given: Given, is_tie: np.ndarray) -> Array:
    return np.where(is_tie, given["tie_coef"] * sizes_of(d), -log_sigmoid(scale * d))


def bradley_terry(d: Array, is_tie: np.ndarray, given: Given) -> Array:
    """Ouyang et al. 2022, arXiv:2203.02155, eq. 1; ties draw scores together."""
    return _preferred(d, 1.0, given, is_tie)


def hps(d: Array, is_tie: np.ndarray, given: Given) -> Array:
    """Wu et al. 2023, arXiv:2306.09341: cross-entropy of two scores at a temperature."""
    return _preferred(d, given["scale"], given, is_tie)


def rao_kupper(d: Array, is_tie: np.ndarray, given: Given) -> Array:
    """Rao and Kupper 1967 with theta = e^w: what is left of 1 is the chance of a tie."""
    w = given["tie_width"]
    better, worse = log_sigmoid(d - w), log_sigmoid(-d - w)
    tie = np.log(np.exp(2 * w) - 1) + better + worse
    return np.where(is_tie, -tie, -better)


def mse(scores: Array, targets: Array, _: Given) -> Array:
    """Squared distance from the target."""
    return (scores - targets) ** 2


def bce(scores: Array, targets: Array, _: Given) -> Array:
    """Cross-entropy of a probability s(score)."""
    return -targets * log_sigmoid(scores) - (1 - targets) * log_sigmoid(-scores)


@dataclass(frozen=True, slots=True)
class RewardLoss:
    """A built-in loss: of differences and ties, or of scores and targets; and its options."""

    function: Callable[[Array, np.ndarray, Given], Array]
    defaults: Given


_TIES = {"tie_coef": 0.01}
REWARD_LOSSES: Mapping[str, RewardLoss] = {
    "bradley_terry": RewardLoss(bradley_terry, _TIES),
    "hps": RewardLoss(hps, {**_TIES, "scale": 1 / 0.07}),
    "rao_kupper": RewardLoss(rao_kupper, {"tie_width": 0.5}),
    "mse": RewardLoss(mse, {}),
    "bce": RewardLoss(bce, {}),
}
# With the names of others.
OTHER_NAMES = {"sigmoid": "bradley_terry", "logexp": "bradley_terry"}


def score_places(step: Step) -> Flags:
    """[rows, seq] the last token of each answer, or of each labelled step."""
    facts, rows = step.record.samples.facts, step.rows
    num_rows, num_tokens = len(rows.lengths), int(rows.lengths.sum())
    sizes = {name: len(facts[name]) for name in (RANK, TARGET) if name in facts}
    if list(sizes.values()) == [num_tokens] and TARGET in sizes:
        return rows.mask
    if list(sizes.values()) != [num_rows]:
        raise RecordError(f"{step.record.folder} does not say how its answers were judged")
    return np.asarray(np.arange(rows.ids.shape[1])[None, :] == rows.lengths[:, None] - 1)


class RewardUpdates(Updates):
    """One update of a reward model.

    Args:
        step: What is audited.
        scorer: Its plain model.
        is_configured: See `Updates`.
    """

    def __init__(self, step: Step, scorer: Scorer, *, is_configured: bool) -> None:
        super().__init__(step, is_configured=is_configured)
        self._scorer, self._facts = scorer, step.record.samples.facts
        name = step.config.reward_loss or ("bradley_terry" if RANK in self._facts else "bce")
        self._loss = REWARD_LOSSES.get(OTHER_NAMES.get(name, name))
        if self._loss is None:
            self._ended["actor"] = f"reward loss {name} is the caller's own"

    def _denominator(self, mask: Flags) -> float:
        """Judged answers; of labelled steps, all of them."""
        is_compared = RANK in self._facts
        return float(self.step.config.train_batch_size if is_compared else mask.sum())

    def _slopes(self, update: Update) -> Slopes:
        step, mask = self.step, update.mask
        self._scorer.load(self._optimizers["actor"].weights)
        (own,) = self._scorer.score(step.rows.ids, mask)
        new = Pair(own, own if update.new is None else update.new)
        error = self._check_scores("scores", update, new, self._scorer)
        scores, doubts = own[mask], error[mask]
        total = self._labelled if RANK not in self._facts else self._compared
        value, slopes = differentiated(total, scores)
        moved, turned = 0.0, np.zeros(len(scores))
        signs = np.where(np.arange(len(scores)) % 2, 1.0, -1.0)
        for shift in (doubts, -doubts, signs * doubts, -signs * doubts):
            other, others = differentiated(total, scores + shift)
            moved, turned = max(moved, abs(other - value)), np.maximum(turned, abs(others - slopes))
        nothing = np.zeros(len(scores))
        first = np.arange(len(scores)) == 0
        self._check_loss(
            "policy", update, Term(value * first, nothing), Term(moved * first, nothing)
        )
        wide, noise = np.zeros(mask.shape), np.zeros(mask.shape)
        wide[mask], noise[mask] = slopes, turned
        return self._gradients(update, self._scorer, [wide], [self._noise_of(wide, noise)])

    def _options(self) -> tuple[RewardLoss, Given]:
        given, loss = self.step.config.reward_loss_args or {}, self._loss
        assert loss is not None  # else nothing is replayed
        return loss, {n: float(given.get(n, value)) for n, value in loss.defaults.items()}

    def _labelled(self, scores: Array) -> Array:
        loss, given = self._options()
        targets = self._facts[TARGET].astype(np.float64)
        if targets.size != scores.size:
            targets = self.step.rows.padded(targets)[self.step.rows.mask]
        return np.asarray(loss.function(scores, targets, given).sum() / len(scores))

    def _compared(self, scores: Array) -> Array:
        """All pairs of the answers to a prompt, which together weigh as much as one judgement."""
        loss, given = self._options()
        first, second, weights = self._pairs()
        ranks = self._facts[RANK]
        margins = self._facts.get(MARGIN, np.zeros(len(ranks))).astype(np.float64)
        d = scores[first] - scores[second] - margins[first]
        values = loss.function(d, ranks[first] == ranks[second], given)
        values = values + self.step.config.centering_coef * (scores[first] + scores[second]) ** 2
        return np.asarray((weights * values).sum() / self.step.config.train_batch_size)

    def _pairs(self) -> tuple[Integers, Integers, Array]:
        """The better and the other answer of each pair, and the pair's weight."""
        items, ranks = items_of(self.step), self._facts[RANK]
        edges = [n for n in range(len(items)) if n == 0 or items[n] != items[n - 1]]
        first, second, weights = [], [], []
        for start, stop in pairwise([*edges, len(items)]):
            both = [
                (i, j) if ranks[i] <= ranks[j] else (j, i)
                for i in range(start, stop)
                for j in range(i + 1, stop)
            ]
            first += [i for i, _ in both]
            second += [j for _, j in both]
            weights += [1 / len(both)] * len(both)
        return np.array(first), np.array(second), np.array(weights)


def reward_audit(config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage; see `stage_named` of `lightrft.tools.audit.report`."""
    del reference

    def build(folder: Path, lora_scale: float, rounds: bool) -> Scorer:
        return Classifier(folder, lora_scale=lora_scale, rounds=rounds)

    def updates(step: Step, is_configured: bool) -> Updates:
        return RewardUpdates(step, trained_model(step), is_configured=is_configured)

    return StageAudit(in_items(config), build, lambda s: check_given(s, score_places(s)), updates)
