"""Objective of a reward model: judgements that compare, rank or label answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from lightrft.config import ConfigError, RewardModelOptions
from lightrft.config.registry import LABEL_LOSSES, REWARD_LOSSES, bind
from lightrft.datasets.preference_rows import LabelledAnswer
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.datasets.row_data import RowData
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.datasets.step_rows import LabelledSteps
from lightrft.models.score_heads import score_weights
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.observer import Facts
from lightrft.stages.reward.comparisons import (
    BINS,
    Comparisons,
    Judgement,
    judgement_facts,
    record_agreement,
    record_comparisons,
    record_scores,
)
from lightrft.stages.reward.score_proofs import prove_published
from lightrft.stages.rows.row_objective import LossShare, RowBatch, RowObjective
from lightrft.stages.rows.row_passes import MicroBatch, PaddedRows, RowPart, RowPasses, shared_part
from lightrft.strategy.backend import inner_module

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from lightrft.models import RewardModel

RewardLoss = Callable[[Tensor, Tensor], Tensor]
Counts = Mapping[str, int]
# Judgements whose scores make the mean and deviation of an exported model.
MAX_NORMALISING = 1024


@dataclass(frozen=True, slots=True)
class RewardObjective(RowObjective[Judgement, Counts]):
    """Mean of the losses of judgements; of labelled steps, the mean over all steps.

    With several scores it is the weighted sum of such means, each over the judgements of one
    score. The score of an answer is read at its last token or pooled over all tokens. The score of
    a step is read at its end.

    Args:
        losses: Loss of each score by name; a single score has the name "".
        weights: Weight of each score by name.
        centering: Weight of the squared sum of the scores of a pair.
        is_paired: Whether judgements compare answers.
        shows_agreement: Whether scores are logits of labels, whose agreement is shown.
    """

    name: ClassVar[str] = "reward"
    item_name: ClassVar[str] = "judgements"
    scores_tokens: ClassVar[bool] = False

    losses: Mapping[str, RewardLoss]
    weights: Mapping[str, float]
    centering: float = 0.0
    is_paired: bool = True
    shows_agreement: bool = False

    @classmethod
    def of(
        cls, config: RewardModelOptions, model: nn.Module, *, is_paired: bool
    ) -> RewardObjective:
        """Build the objective from the options and the scores of a prepared model."""
        weights = score_weights(config_of(model))
        return cls(
            build_losses(config, weights, is_paired=is_paired),
            weights,
            config.centering_coef,
            is_paired,
            loss_name(config, is_paired=is_paired) == "bce",
        )

    def measure(self, part: RowPart[Judgement], number: int = 0) -> Counts:
        """Count the losses of each score over the judgements of all ranks, at least 1."""
        return {name: max(1, count_losses(part.items, name)) for name in self.weights}

    def normalizer(self, part: RowPart[Judgement], known: Counts) -> Tensor:
        """Return the number of losses over all scores, []."""
        return torch.tensor(float(sum(known.values())))

    def facts(self, items: Sequence[Judgement]) -> Facts:
        """Return facts of the data about some judgements."""
        return judgement_facts(items)

    def share(self, micro: MicroBatch[Judgement], known: Counts, metrics: StepMetrics) -> LossShare:
        """Compute the share of a micro-batch in the loss."""
        rows = self._laid_out(micro.rows, micro.items)
        scores = self._read(rows, micro.items, micro.passes)
        share = scores.new_zeros(())
        for column, (name, weight) in zip(scores.unbind(1), self.weights.items(), strict=True):
            total = self.sum_of_losses(micro.items, column, name)
            share = share + weight * total / known[name]
        self._record(micro.items, scores.detach(), metrics)
        values = torch.zeros(rows.is_trained.shape, device=scores.device)
        values[rows.is_trained] = self._joined(scores.detach()).float()
        return LossShare(share, {"policy": share}, rows, values)

    def score(self, judgements: Sequence[Judgement], passes: RowPasses) -> Tensor:
        """Return scores [answers] in float64 of answers or of their steps, by judgement."""
        rows = passes.pad([row for each in judgements for row in each.rows])
        laid_out = self._laid_out(rows, judgements)
        return self._joined(self._read(laid_out, judgements, passes))

    def _joined(self, scores: Tensor) -> Tensor:
        """Return the weighted sum of scores [answers, names]."""
        return (scores * scores.new_tensor(list(self.weights.values()))).sum(1)

    def _laid_out(self, rows: PaddedRows, judgements: Sequence[Judgement]) -> PaddedRows:
        """Mark as trained the tokens at which a score is read, unless it is pooled."""
        if isinstance(judgements[0], LabelledSteps):
            return rows
        counts = rows.attention_mask.cumsum(dim=1)
        is_last = rows.attention_mask & (counts == counts[:, -1:])
        return replace(rows, is_trained=is_last)

    def _read(self, rows: PaddedRows, judgements: Sequence[Judgement], passes: RowPasses) -> Tensor:
        """Return scores [answers, names] in float64."""
        model, where = passes.model, rows.is_trained
        if not isinstance(judgements[0], LabelledSteps):
            seen = (rows.token_ids, rows.attention_mask)
            scores: Tensor = model(*seen, media=rows.media, by_name=True)
            return scores.double()
        read: Tensor = model(rows.token_ids, rows.attention_mask, is_read=where, by_name=True)
        return read[where].double()

    def sum_of_losses(
        self, judgements: Sequence[Judgement], scores: Tensor, name: str = ""
    ) -> Tensor:
        """Return the sum of the losses of judgements under one score."""
        loss = self.losses[name]
        if not self.is_paired:
            return loss(scores, _labels(judgements, scores)).sum()
        pairs = Comparisons.of(judgements, scores.device, name)
        losses = loss(pairs.differences(scores) - pairs.margins, pairs.is_tie)
        if self.centering:
            # Eisenstein et al. 2023, arXiv:2312.09244, sec. 2.
            sums = scores[pairs.better] + scores[pairs.worse]
            losses = losses + self.centering * sums.square()
        return (pairs.weights * losses).sum()

    def _record(
        self, judgements: Sequence[Judgement], scores: Tensor, metrics: StepMetrics
    ) -> None:
        lengths = torch.tensor(_read_lengths(judgements), device=scores.device)
        record_scores(metrics, self._joined(scores), lengths)
        for column, name in zip(scores.unbind(1), self.weights, strict=True):
            pairs = Comparisons.of(judgements, scores.device, name)
            record_comparisons(metrics, column, lengths, pairs, name)
        if self.shows_agreement:
            scores = scores[:, 0]
            signs = 2 * _labels(judgements, scores) - 1
            record_agreement(metrics, signs * scores, torch.ones_like(scores))

    def finish(
        self, batch: RowBatch[Judgement, Counts], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Complete the metrics of a step."""
        # The comparisons of a step are too few for bins.
        metrics = {name: value for name, value in metrics.items() if not name.startswith(BINS)}
        return metrics | {"num_tokens": float(sum(batch.lengths))}

    def doubts(
        self, held_out: Mapping[str, float], trained: Mapping[str, float] | None, num_items: int
    ) -> list[str]:
        """Report a trained model that does worse than guessing."""
        accuracy = held_out.get("accuracy", 0.5)
        # Three standard deviations below guessing.
        if trained is None or accuracy >= 0.5 - 1.5 / math.sqrt(num_items):
            return []
        return [
            f"only {accuracy:.1%} of {num_items} held-out judgements are met, less than guessing "
            "would: chosen and rejected (or the labels) are probably swapped in prompt_data or in "
            "eval_data"
        ]

    @torch.no_grad()
    def conclude(self, data: RowData[Judgement], passes: RowPasses) -> None:
        """Store mean and deviation of scores on training data in the saved configuration."""
        passes.model.eval()
        every = -(-len(data) // MAX_NORMALISING)
        metrics = self.evaluate(shared_part(data.rows[::every], passes))
        config = config_of(passes.model)
        config.score_mean, config.score_std = metrics["score"], metrics["score_std"]

    def prove_saved(self, folder: Path, data: RowData[Judgement], passes: RowPasses) -> None:
        """Prove that the written model scores like the trained one; see `prove_published`."""
        passes.model.eval()
        prove_published(passes.model, folder, data.rows, passes.context)


def config_of(model: nn.Module) -> PretrainedConfig:
    """Return the configuration of a reward model, prepared or not."""
    return cast("RewardModel", inner_module(model)).config


def count_losses(judgements: Sequence[Judgement], name: str = "") -> int:
    """Return the number of judgements, or of steps, over which a score's loss is averaged."""
    if name:
        return sum(isinstance(e, RankedAnswers) and bool(e.ranks_of(name)) for e in judgements)
    return sum(len(each.labels) if isinstance(each, LabelledSteps) else 1 for each in judgements)


def _read_lengths(judgements: Sequence[Judgement]) -> list[int]:
    """Return the tokens of each row, or up to the end of each step."""
    lengths: list[int] = []
    for each in judgements:
        if isinstance(each, LabelledSteps):
            lengths += (np.flatnonzero(each.answer.is_trained) + 1).tolist()
        else:
            lengths += [len(row.token_ids) for row in each.rows]
    return lengths


def _labels(judgements: Sequence[Judgement], like: Tensor) -> Tensor:
    """Return [scores] 1 for good answers or steps, 0 for others; or the scores of the data."""
    labels: list[float] = []
    for each in judgements:
        if isinstance(each, LabelledSteps):
            labels += each.labels
        elif isinstance(each, LabelledAnswer):
            labels.append(each.is_good)
        elif isinstance(each, ScoredAnswer):
            labels.append(each.score)
    return torch.tensor(labels, dtype=like.dtype, device=like.device)


def loss_name(config: RewardModelOptions, *, is_paired: bool) -> str:
    """Return the name of the run's loss: as set, else the default for its data."""
    return config.reward_loss or ("bradley_terry" if is_paired else "bce")


def build_losses(
    config: RewardModelOptions, scores: Collection[str], *, is_paired: bool
) -> dict[str, RewardLoss]:
    """Return the loss of each score; see `build_loss`."""
    names = config.reward_head_losses or (None,) * len(scores)
    return {
        name: build_loss(config, is_paired=is_paired, name=loss)
        for name, loss in zip(scores, names, strict=True)
    }


def build_loss(
    config: RewardModelOptions, *, is_paired: bool, name: str | None = None
) -> RewardLoss:
    """Return the loss of a run with its hyper-parameters, tried on an example.

    Args:
        config: Options; `reward_loss`, `reward_loss_args` and `centering_coef` are read.
        is_paired: Whether the data hold pairs; else they hold labelled answers.
        name: Name of the loss; None is that of the run.

    Raises:
        ConfigError: The loss is for other data, or fails on the example.
    """
    name = name or loss_name(config, is_paired=is_paired)
    kinds = ("labelled answers", "pairs or rankings")
    if (name in LABEL_LOSSES) == is_paired:
        raise ConfigError(
            f"reward_loss {name} is of {kinds[not is_paired]}, and prompt_data holds "
            f"{kinds[is_paired]}: leave it out, or give other rows"
        )
    if config.centering_coef and not is_paired:
        raise ConfigError("centering_coef is of pairs, and prompt_data holds labelled answers")
    owner = f"reward_loss {name}"
    function = cast("RewardLoss", REWARD_LOSSES.load(name))
    loss = bind(function, config.reward_loss_args or {}, owner=owner)
    values = torch.ones(2, dtype=torch.float64, requires_grad=True)
    other = torch.zeros(2, dtype=torch.bool if is_paired else torch.float64)
    try:
        loss(values, other).reshape(2).sum().backward()
    except Exception as error:
        raise ConfigError(
            f"{owner} cannot be called with two tensors [{'pairs' if is_paired else 'rows'}], or "
            f"gives no differentiable one: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return loss
