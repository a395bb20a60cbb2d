"""Optimizer steps of a reward model on judgements: compared, ranked or labelled answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import LABEL_LOSSES, REWARD_LOSSES, bind
from lightrft.datasets.preference_rows import LabelledAnswer
from lightrft.datasets.ranked_rows import RankedAnswers
from lightrft.datasets.row_media import RowPixels
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.datasets.step_rows import LabelledSteps
from lightrft.experience.minibatches import MinibatchPlan, micro_slices, plan_minibatches
from lightrft.models.score_heads import score_weights
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.models import configure_models
from lightrft.stages.reward.comparisons import (
    BINS,
    Comparisons,
    JudgedData,
    Judgement,
    judgement_facts,
    record_agreement,
    record_comparisons,
    record_scores,
)
from lightrft.stages.reward.score_proofs import prove_published
from lightrft.stages.rows.padded_rows import PaddedRows, pad
from lightrft.stages.rows.row_observer import RowObserver, open_row_observer
from lightrft.stages.rows.row_stage import bounded_by_tokens, drawn_places, planned_updates
from lightrft.stages.stage import (
    Stage,
    Step,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrft.models import RewardModel
    from lightrft.strategy.strategy_base import StrategyBase

RewardLoss = Callable[[Tensor, Tensor], Tensor]
# Judgements whose scores make the mean and deviation of an exported model.
MAX_NORMALISING = 1024


@dataclass(frozen=True, slots=True)
class JudgementBatch:
    """Judgements of one optimizer step.

    Args:
        judgements: Of all ranks, the same on each.
        plan: Distributes them over the ranks.
    """

    judgements: tuple[Judgement, ...]
    plan: MinibatchPlan

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """[rows] tokens of each row."""
        return np.array(
            [len(row.token_ids) for each in self.judgements for row in each.rows], dtype=np.int64
        )

    def row_places(self, places: NDArray[np.int64]) -> list[int]:
        """Places of the rows of some judgements among those of all of them."""
        starts = np.cumsum([0, *(len(each.rows) for each in self.judgements)]).tolist()
        return [row for place in places for row in range(starts[place], starts[place + 1])]


class RewardStage(Stage[JudgementBatch]):
    """One optimizer step on `train_batch_size` judgements, drawn anew in each pass over the data.

    loss = sum of the losses of the judgements / their number, both over all ranks and
    micro-batches; of labelled steps, of all of them; of several scores, the weighted sum of these
    means over the judgements that each has. The score of an answer is read at its last token or
    pooled over all, that of a step at the end of the step.

    Args:
        config: Options of the run; what they leave to the machine is decided.
        strategy: Trains over ranks.
        models: One, a `RewardModel`.
        data: To train on.
        held_out: To evaluate on, of the same kind.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        data: JudgedData,
        held_out: Sequence[Judgement] = (),
    ) -> None:
        self.config, self.strategy, self.models = config, strategy, models
        self.data, self.held_out = data, held_out
        self.item_name = "judgements"
        answers = (row for each in (*data.rows, *held_out) for row in each.rows)
        self._pixels = RowPixels.of(data.encoder, answers)
        self._weights = score_weights(self.model_config)
        self._losses = build_losses(config, self._weights, is_paired=data.is_paired)
        self._has_trained = False
        self.config = config = configure_models(
            config, strategy, [models.main.model], kept=self.kept_dropout
        )
        size = config.train_batch_size // strategy.world_size
        self.loader = strategy.setup_dataloader(data, size, collate_fn=list)
        num_rows = max(len(each.rows) for each in data.rows)
        self._cut = bounded_by_tokens(config, rows_per_item=num_rows)

    def planned_steps(self) -> int:
        """See `Stage`."""
        return planned_updates(self.data, self.config, self.strategy)

    def draw(self, step: Step) -> JudgementBatch:
        """See `Stage`; every rank learns all rows, so that long ones are shared out evenly."""
        places = drawn_places(step, self.strategy)
        return self.batch_of([self.data.rows[place] for place in places], step.number)

    def batch_of(self, judgements: Sequence[Judgement], number: int) -> JudgementBatch:
        """The judgements of one step, distributed over the ranks."""
        plan = plan_minibatches(
            self._sizes(judgements),
            train_batch_size=len(judgements),
            world_size=self.strategy.num_data_ranks,
            seed=self.config.seed,
            step=number,
        )
        return JudgementBatch(tuple(judgements), plan)

    def _sizes(self, judgements: Sequence[Judgement]) -> list[int]:
        """Tokens of each in a forward pass, its padding included unless packed."""
        lengths = [[len(row.token_ids) for row in each.rows] for each in judgements]
        if self.config.packing_samples:
            return [sum(rows) for rows in lengths]
        return [len(rows) * max(rows) for rows in lengths]

    def update(self, batch: JudgementBatch, step: Step) -> Work:
        """See `Stage`."""
        strategy, rank = self.strategy, self.strategy.data_rank
        places = batch.plan.row_index(rank)
        slices = batch.plan.micro_slices(
            self._sizes(batch.judgements),
            index=0,
            rank=rank,
            micro_batch_size=self.config.micro_train_batch_size,
            config=self._cut,
        )
        rows = [each.rows for each in batch.judgements]
        observer = open_row_observer(
            "reward",
            self,
            step,
            rows,
            (each.rows for each in self.data.rows),
            partial(judgement_facts, batch.judgements),
        )
        counts = self._counts(batch.judgements)
        observer.begin_update(self.models.main.name, torch.tensor(float(sum(counts.values()))))
        share = partial(self._share, batch, counts, step.metrics, observer)
        result = optimizer_step(
            self.models.main,
            [partial(share, places[part]) for part in slices],
            strategy=strategy,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        observer.end_update(result)
        observer.finish()
        record_total("loss", strategy, step.metrics)
        self._has_trained = True
        if step.number == step.num_planned:
            self.models.main.model.eval()
            self._note_scores()
        return Work((self.models.main.name,), batch.row_lengths, np.zeros_like(batch.row_lengths))

    def _counts(self, judgements: Sequence[Judgement]) -> dict[str, int]:
        """Losses of each score over these judgements of all ranks, at least 1."""
        return {name: max(1, count_losses(judgements, name)) for name in self._weights}

    def _share(
        self,
        batch: JudgementBatch,
        counts: Mapping[str, int],
        metrics: StepMetrics,
        observer: RowObserver,
        places: NDArray[np.int64],
    ) -> Tensor:
        """The share of a micro-batch in the loss of the step."""
        judgements = [batch.judgements[place] for place in places]
        rows = self._laid_out(judgements, batch.row_places(places))
        scores = self._read(rows, judgements)
        share = self._recorded_share(judgements, scores, counts, metrics)
        values = torch.zeros(rows.is_trained.shape, device=scores.device)
        values[rows.is_trained] = self._joined(scores.detach()).float()
        observer.micro_batch(rows, values, {"policy": share})
        return share

    def _recorded_share(
        self,
        judgements: Sequence[Judgement],
        scores: Tensor,
        counts: Mapping[str, int],
        metrics: StepMetrics,
    ) -> Tensor:
        """The share of scores [answers, names] in a loss, whose metrics are added."""
        share = scores.new_zeros(())
        for own, (name, weight) in zip(scores.unbind(1), self._weights.items(), strict=True):
            share = share + weight * self.sum_of_losses(judgements, own, name) / counts[name]
        metrics.add_mean("loss", share, 0.0)
        self._record(judgements, scores.detach(), metrics)
        return share

    def score(self, judgements: Sequence[Judgement]) -> Tensor:
        """[answers] float64 of the answers, or of their steps, judgement by judgement."""
        return self._joined(self._scores(judgements))

    def _joined(self, scores: Tensor) -> Tensor:
        """The weighted sum of scores [answers, names]."""
        return (scores * scores.new_tensor(list(self._weights.values()))).sum(1)

    def _scores(self, judgements: Sequence[Judgement]) -> Tensor:
        """[answers, names] float64; see `score`."""
        return self._read(self._laid_out(judgements), judgements)

    def _laid_out(self, judgements: Sequence[Judgement], places: Sequence[int] = ()) -> PaddedRows:
        """Rows as tensors; trained are the tokens at which a score is read, if it is not pooled."""
        rows = pad(
            [row for each in judgements for row in each.rows],
            self.strategy.device,
            places,
            pixels=self._pixels,
        )
        if isinstance(judgements[0], LabelledSteps):
            return rows
        counts = rows.attention_mask.cumsum(dim=1)
        is_last = rows.attention_mask & (counts == counts[:, -1:])
        return replace(rows, is_trained=is_last)

    def _read(self, rows: PaddedRows, judgements: Sequence[Judgement]) -> Tensor:
        model, where = self.models.main.model, rows.is_trained
        if not isinstance(judgements[0], LabelledSteps):
            seen = (rows.token_ids, rows.attention_mask)
            scores: Tensor = model(*seen, media=rows.media, by_name=True)
            return scores.double()
        found: Tensor = model(rows.token_ids, rows.attention_mask, is_read=where, by_name=True)
        return found[where].double()

    def sum_of_losses(
        self, judgements: Sequence[Judgement], scores: Tensor, name: str = ""
    ) -> Tensor:
        """Return the sum of the losses of judgements under one objective."""
        loss = self._losses[name]
        if not self.data.is_paired:
            return loss(scores, _labels(judgements, scores)).sum()
        pairs = Comparisons.of(judgements, scores.device, name)
        losses = loss(pairs.differences(scores) - pairs.margins, pairs.is_tie)
        if self.config.centering_coef:
            # Eisenstein et al. 2023, arXiv:2312.09244, sec. 2.
            sums = scores[pairs.better] + scores[pairs.worse]
            losses = losses + self.config.centering_coef * sums.square()
        return (pairs.weights * losses).sum()

    def _record(
        self, judgements: Sequence[Judgement], scores: Tensor, metrics: StepMetrics
    ) -> None:
        lengths = torch.tensor(_read_lengths(judgements), device=scores.device)
        record_scores(metrics, self._joined(scores), lengths)
        for own, name in zip(scores.unbind(1), self._weights, strict=True):
            pairs = Comparisons.of(judgements, scores.device, name)
            record_comparisons(metrics, own, lengths, pairs, name)
        scores = scores[:, 0]
        if loss_name(self.config, is_paired=self.data.is_paired) == "bce":
            signs = 2 * _labels(judgements, scores) - 1
            record_agreement(metrics, signs * scores, torch.ones_like(scores))

    def finish(self, batch: JudgementBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`."""
        # The comparisons of a step are too few for bins.
        metrics = {name: value for name, value in metrics.items() if not name.startswith(BINS)}
        return metrics | {"num_tokens": float(batch.row_lengths.sum())}

    def evaluate(self) -> dict[str, float]:
        """The metrics of a step, over all held-out judgements."""
        if not self.held_out:
            return {}
        found = self._scored(self.held_out)
        accuracy, size = found.get("accuracy", 0.5), len(self.held_out)
        # Three deviations below guessing.
        if self._has_trained and accuracy < 0.5 - 1.5 / math.sqrt(size):
            self.strategy.print(
                f"warning: only {accuracy:.1%} of {size} held-out judgements are met, less than "
                "guessing would: chosen and rejected (or the labels) are probably swapped in "
                "prompt_data or in eval_data"
            )
        return {f"eval/{name}": value for name, value in found.items()} | {
            "eval/num_rows": float(size)
        }

    @torch.no_grad()
    def _scored(self, judgements: Sequence[Judgement]) -> dict[str, float]:
        """Loss and metrics of judgements that every rank knows; collective."""
        num_ranks, metrics = self.strategy.num_data_ranks, StepMetrics()
        counts = self._counts(judgements)
        num_own = -(-len(judgements) // num_ranks)
        # Every rank makes equally many passes, or sharded layers would wait for each other.
        for part in micro_slices(0, num_own, self.config.micro_train_batch_size):
            chosen = judgements[self.strategy.data_rank :: num_ranks][part]
            scores = self._scores(chosen or judgements[:1])
            if not chosen:
                scores = scores[:0]
            self._recorded_share(chosen, scores, counts, metrics)
        record_total("loss", self.strategy, metrics)
        return metrics.reduce(self.strategy)

    def _note_scores(self) -> None:
        """Puts mean and deviation of scores on training data into the saved configuration."""
        every = -(-len(self.data) // MAX_NORMALISING)
        found = self._scored(self.data.rows[::every])
        config = self.model_config
        config.score_mean, config.score_std = found["score"], found["score_std"]

    def prove_saved(self, folder: Path) -> None:
        """See `Stage` and `prove_published`."""
        model = self.models.main.model
        model.eval()
        prove_published(model, folder, self.data.rows, config=self.config, strategy=self.strategy)

    @property
    def model_config(self) -> PretrainedConfig:
        """The configuration of the model."""
        return cast("RewardModel", self.strategy.unwrap_model(self.models.main.model)).config

    def resumed(self) -> None:
        """See `Stage`; the checkpoint of the last step may be all that the run had come to."""
        self._has_trained = True
        self.models.main.model.eval()
        self._note_scores()


def count_losses(judgements: Sequence[Judgement], name: str = "") -> int:
    """Judgements of a score, or where they are of steps, the steps: what a loss is the mean of."""
    if name:
        return sum(isinstance(e, RankedAnswers) and bool(e.ranks_of(name)) for e in judgements)
    return sum(len(each.labels) if isinstance(each, LabelledSteps) else 1 for each in judgements)


def _read_lengths(judgements: Sequence[Judgement]) -> list[int]:
    """Tokens of each row, or up to the end of each step."""
    lengths: list[int] = []
    for each in judgements:
        if isinstance(each, LabelledSteps):
            lengths += (np.flatnonzero(each.answer.is_trained) + 1).tolist()
        else:
            lengths += [len(row.token_ids) for row in each.rows]
    return lengths


def _labels(judgements: Sequence[Judgement], like: Tensor) -> Tensor:
    """[scores] 1 of good answers or steps, 0 of others; given scores."""
    labels: list[float] = []
    for each in judgements:
        if isinstance(each, LabelledSteps):
            labels += each.labels
        elif isinstance(each, LabelledAnswer):
            labels.append(each.is_good)
        elif isinstance(each, ScoredAnswer):
            labels.append(each.score)
    return torch.tensor(labels, dtype=like.dtype, device=like.device)


def loss_name(config: TrainConfig, *, is_paired: bool) -> str:
    """The loss of a run: as set, else that of its data."""
    return config.reward_loss or ("bradley_terry" if is_paired else "bce")


def build_losses(
    config: TrainConfig, scores: Collection[str], *, is_paired: bool
) -> dict[str, RewardLoss]:
    """The loss of each score; see `build_loss`."""
    own = config.reward_head_losses or (None,) * len(scores)
    return {
        name: build_loss(config, is_paired=is_paired, name=loss)
        for name, loss in zip(scores, own, strict=True)
    }


def build_loss(config: TrainConfig, *, is_paired: bool, name: str | None = None) -> RewardLoss:
    """The loss of a run with its hyper-parameters, tried on an example.

    Args:
        config: Its options `reward_loss`, `reward_loss_args` and `centering_coef` count.
        is_paired: The data hold pairs, not labelled answers.
        name: Of the loss; None is that of the run.

    Raises:
        ConfigError: It is of other data, or cannot be called as it will be.
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
        loss(values, other).reshape(2).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"{owner} cannot be called with two tensors [{'pairs' if is_paired else 'rows'}], or "
            f"gives no differentiable one: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return loss
