"""Optimizer steps of a reward model on judgements: compared, ranked or labelled answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import LABEL_LOSSES, REWARD_LOSSES, bind
from lightrft.datasets.preference_rows import LabelledAnswer
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.datasets.step_rows import LabelledSteps
from lightrft.experience.minibatches import MinibatchPlan, micro_slices, plan_minibatches
from lightrft.records.batch import pad_rows
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.models import configure_models
from lightrft.stages.reward.comparisons import (
    Comparisons,
    JudgedData,
    Judgement,
    record_agreement,
    record_scores,
)
from lightrft.stages.stage import (
    Stage,
    Step,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)
from lightrft.stages.supervised.supervised_stage import (
    bounded_by_tokens,
    drawn_places,
    planned_updates,
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


class RewardStage(Stage[JudgementBatch]):
    """One optimizer step on `train_batch_size` judgements, drawn anew in each pass over the data.

    loss = sum of the losses of the judgements / their number, both over all ranks and
    micro-batches; of labelled steps, of all of them. The score of an answer is read at its last
    token, that of a step at the end of the step.

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
        self._loss = build_loss(config, is_paired=data.is_paired)
        self._has_trained = False
        configure_models(config, strategy, [models.main.model])
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
        own = [batch.judgements[place] for place in batch.plan.row_index(rank)]
        slices = batch.plan.micro_slices(
            self._sizes(batch.judgements),
            index=0,
            rank=rank,
            micro_batch_size=self.config.micro_train_batch_size,
            config=self._cut,
        )
        num_all = count_losses(batch.judgements)
        optimizer_step(
            self.models.main,
            [partial(self._share, own[part], num_all, step.metrics) for part in slices],
            strategy=strategy,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        record_total("loss", strategy, step.metrics)
        self._has_trained = True
        if step.number == step.num_planned:
            self.models.main.model.eval()
            self._note_scores()
        return Work((self.models.main.name,), batch.row_lengths, np.zeros_like(batch.row_lengths))

    def _share(self, judgements: Sequence[Judgement], num_all: int, metrics: StepMetrics) -> Tensor:
        """The share of a micro-batch in the loss of the step."""
        scores = self.score(judgements)
        share = self._sum_of_losses(judgements, scores) / num_all
        metrics.add_mean("loss", share, 0.0)
        self._record(judgements, scores, metrics)
        return share

    def score(self, judgements: Sequence[Judgement]) -> Tensor:
        """[scores] float64 of the answers, or of their steps, judgement by judgement."""
        rows = [row for each in judgements for row in each.rows]
        device, model = self.strategy.device, self.models.main.model
        token_ids, attention_mask = pad_rows([row.token_ids.tolist() for row in rows], device)
        if not isinstance(judgements[0], LabelledSteps):
            scores: Tensor = model(token_ids, attention_mask)
            return scores.double()
        is_read = torch.zeros_like(attention_mask)
        flat = np.concatenate([row.is_trained for row in rows])
        is_read[attention_mask] = torch.from_numpy(flat).to(device)
        found: Tensor = model(token_ids, attention_mask, is_read=is_read)
        return found[is_read].double()

    def _sum_of_losses(self, judgements: Sequence[Judgement], scores: Tensor) -> Tensor:
        if not self.data.is_paired:
            return self._loss(scores, _labels(judgements, scores)).sum()
        pairs = Comparisons.of(judgements, scores.device)
        losses = self._loss(pairs.differences(scores) - pairs.margins, pairs.is_tie)
        if self.config.centering_coef:
            # Eisenstein et al. 2023, arXiv:2312.09244, sec. 2.
            sums = scores[pairs.better] + scores[pairs.worse]
            losses = losses + self.config.centering_coef * sums.square()
        return (pairs.weights * losses).sum()

    def _record(
        self, judgements: Sequence[Judgement], scores: Tensor, metrics: StepMetrics
    ) -> None:
        scores = scores.detach()
        lengths = torch.tensor(_read_lengths(judgements), device=scores.device)
        record_scores(metrics, scores, lengths, Comparisons.of(judgements, scores.device))
        if loss_name(self.config, is_paired=self.data.is_paired) == "bce":
            signs = 2 * _labels(judgements, scores) - 1
            record_agreement(metrics, signs * scores, torch.ones_like(scores))

    def finish(self, batch: JudgementBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`."""
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
        num_own = -(-len(judgements) // num_ranks)
        # Every rank makes equally many passes, or sharded layers would wait for each other.
        for part in micro_slices(0, num_own, self.config.micro_train_batch_size):
            chosen = judgements[self.strategy.data_rank :: num_ranks][part]
            scores = self.score(chosen or judgements[:1])
            if not chosen:
                scores = scores[:0]
            metrics.add_mean("loss", self._sum_of_losses(chosen, scores), count_losses(chosen))
            self._record(chosen, scores, metrics)
        return metrics.reduce(self.strategy)

    def _note_scores(self) -> None:
        """Puts mean and deviation of scores on training data into the saved configuration."""
        every = -(-len(self.data) // MAX_NORMALISING)
        found = self._scored(self.data.rows[::every])
        config = self.model_config
        config.score_mean, config.score_std = found["score"], found["score_std"]

    @property
    def model_config(self) -> PretrainedConfig:
        """The configuration of the model."""
        return cast("RewardModel", self.strategy.unwrap_model(self.models.main.model)).config

    def resumed(self) -> None:
        """See `Stage`."""
        self._has_trained = True


def count_losses(judgements: Sequence[Judgement]) -> int:
    """Judgements, or where they are of steps, the steps: what a loss is the mean of."""
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


def build_loss(config: TrainConfig, *, is_paired: bool) -> RewardLoss:
    """The loss of a run with its hyper-parameters, tried on an example.

    Args:
        config: Its options `reward_loss`, `reward_loss_args` and `centering_coef` count.
        is_paired: The data hold pairs, not labelled answers.

    Raises:
        ConfigError: It is of other data, or cannot be called as it will be.
    """
    name = loss_name(config, is_paired=is_paired)
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


def prove_pooling(stage: RewardStage) -> float:
    """Proves that the score of a row depends on its last token and on no padding; collective.

    Returns:
        By how much a score at least changes with the last token.

    Raises:
        ConfigError: It does not.
    """
    device, model = stage.strategy.device, stage.models.main.model
    texts = [row.token_ids.tolist() for each in stage.data.rows[:8] for row in each.rows]
    # Without its last token the shortest row is padded, also where all are of one length.
    texts = [min(texts, key=len)[:-1], max(texts, key=len)]
    token_ids, attention_mask = pad_rows(texts, device)
    size = stage.model_config.get_text_config().vocab_size
    is_last = attention_mask & (attention_mask.cumsum(1) == attention_mask.sum(1, keepdim=True))
    padded = torch.where(attention_mask, token_ids, 1)
    changed = torch.where(is_last, (token_ids + 1) % size, token_ids)
    model.eval()
    with torch.no_grad():
        found = [model(ids, attention_mask) for ids in (token_ids, padded, changed)]
    by_padding = float((found[0] - found[1]).abs().max())
    by_token = float((found[0] - found[2]).abs().min())
    if by_padding > 1e-3 * by_token or by_token == 0:
        raise ConfigError(
            "pretrain: the score of a row must come from its last token and not from padding: "
            f"another last token changes it by {by_token:.3g}, other padding by {by_padding:.3g}; "
            "give a causal model"
        )
    return by_token
