"""Optimizer steps on supervised rows: a mean over their trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.algorithms.aggregation import local_normalizer, loss_weights
from lightrft.algorithms.supervised_losses import LOSSES
from lightrft.config import TrainConfig
from lightrft.datasets.row_media import RowPixels
from lightrft.datasets.supervised_rows import SupervisedRow, SupervisedRows
from lightrft.experience.minibatches import MinibatchPlan, micro_slices, plan_minibatches
from lightrft.models.types import ActorOutput, TokenLossFunction
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.models import configure_models
from lightrft.stages.rows.padded_rows import PaddedRows, pad
from lightrft.stages.rows.row_observer import RowObserver, open_row_observer
from lightrft.stages.rows.row_stage import (
    RowBatch,
    _num_trained,
    best_fit,
    bounded_by_tokens,
    drawn_places,
    perplexity,
    planned_updates,
    score_padded,
)
from lightrft.stages.stage import (
    KeptDropout,
    Stage,
    Step,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


class SupervisedStage(Stage[RowBatch]):
    """One optimizer step on `train_batch_size` rows, drawn anew in each pass over the data.

    loss = -sum_it m_it log p(token_it) / M, with M = sum m over all rows of the step: of all ranks
    and micro-batches; `sft_loss` names others.

    Args:
        config: Options of the run; what they leave to the machine is decided.
        strategy: Trains over ranks.
        models: One.
        data: To train on.
        held_out: To evaluate on.
    """

    name = "sft"
    teachers: Mapping[str, nn.Module] = MappingProxyType({})
    # Nothing is compared with the loss.
    kept_dropout: KeptDropout = "model"

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        data: SupervisedRows,
        held_out: Sequence[SupervisedRow] = (),
    ) -> None:
        self.config, self.strategy, self.models = config, strategy, models
        self.data, self.held_out = data, held_out
        self._loss = LOSSES[config.sft_loss]
        self._pixels = RowPixels.of(data.encoder, (*data.rows, *held_out))
        self.config = config = configure_models(
            config, strategy, [models.main.model, *self.teachers.values()], kept=self.kept_dropout
        )
        size = config.train_batch_size // strategy.world_size
        self.loader = strategy.setup_dataloader(data, size, collate_fn=list)
        self._cut = bounded_by_tokens(config)

    def planned_steps(self) -> int:
        """See `Stage`."""
        return planned_updates(self.data, self.config, self.strategy)

    def draw(self, step: Step) -> RowBatch:
        """See `Stage`; every rank learns all rows, so that long ones are shared out evenly."""
        rows = tuple(self.data.rows[place] for place in drawn_places(step, self.strategy))
        return self.batch_of(rows, step.number)

    def batch_of(self, rows: tuple[SupervisedRow, ...], number: int) -> RowBatch:
        """The rows of one step, distributed over the ranks."""
        plan = plan_minibatches(
            [len(row.token_ids) for row in rows],
            train_batch_size=len(rows),
            world_size=self.strategy.num_data_ranks,
            seed=self.config.seed,
            step=number,
        )
        if self.config.packing_samples and self._cut.micro_batch_tokens is not None:
            lengths = [len(row.token_ids) for row in rows]
            shares = (best_fit(own, lengths, self._cut.micro_batch_tokens) for own in plan.rows[0])
            plan = MinibatchPlan((tuple(shares),))
        return RowBatch(rows, plan)

    def update(self, batch: RowBatch, step: Step) -> Work:
        """See `Stage`."""
        strategy, rank = self.strategy, self.strategy.data_rank
        places = batch.plan.row_index(rank).tolist()
        own = [batch.rows[place] for place in places]
        # Of the same masks as the loss.
        count = local_normalizer(pad(own, strategy.device).is_trained, self._loss.aggregation)
        normalizer = strategy.reduce_over_data(count, "sum")
        slices = batch.plan.micro_slices(
            batch.lengths,
            index=0,
            rank=rank,
            micro_batch_size=self.config.micro_train_batch_size,
            config=self._cut,
        )
        items, data = [(row,) for row in batch.rows], ((row,) for row in self.data.rows)
        observer = open_row_observer(self.name, self, step, items, data)
        observer.begin_update(self.models.main.name, normalizer)

        def shares(part: slice) -> Callable[[], Tensor]:
            padded = partial(pad, own[part], strategy.device, places[part], pixels=self._pixels)
            return lambda: self._share(padded(), normalizer, step.metrics, observer)

        result = optimizer_step(
            self.models.main,
            [shares(part) for part in slices],
            strategy=strategy,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        observer.end_update(result)
        observer.finish()
        record_total("loss", strategy, step.metrics)
        return Work((self.models.main.name,), batch.lengths, batch.trained)

    def _share(
        self,
        padded: PaddedRows,
        normalizer: Tensor,
        metrics: StepMetrics,
        observer: RowObserver,
    ) -> Tensor:
        """The share of a micro-batch in the loss of the step."""
        weights = loss_weights(padded.is_trained, self._loss.aggregation, dtype=torch.float64)

        def share_of(logprobs: Tensor, _: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
            return self._loss.share(logprobs, weights[rows, columns], normalizer)

        # Inside the output projection where that is fused: the same number with less work.
        output = self._score(padded, share_of if self.config.fused_linear_logprob else None)
        share = output.loss
        if share is None:
            share = self._loss.share(output.logprobs, weights, normalizer)
        observer.micro_batch(padded, output.logprobs, {"policy": share})
        metrics.add_mean("loss", share, 0.0)
        if self.config.sft_loss != "token-mean":
            metrics.add_masked_mean("nll", -output.logprobs, padded.is_trained)
        return share

    def _score(
        self, padded: PaddedRows, token_loss: TokenLossFunction | None = None
    ) -> ActorOutput:
        """See `score_padded`."""
        return score_padded(self.models.main.model, padded, token_loss)

    def finish(self, batch: RowBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`."""
        num_tokens, num_trained = int(batch.lengths.sum()), int(batch.trained.sum())
        return metrics | {
            "perplexity": perplexity(metrics.get("nll", metrics["loss"])),
            "num_tokens": float(num_tokens),
            "trained_share": num_trained / num_tokens,
        }

    def evaluate(self) -> dict[str, float]:
        """The loss over all trained tokens of the held-out rows; `eval/logprob` is -loss."""
        rows, strategy = self.held_out, self.strategy
        if not rows:
            return {}
        num_ranks = strategy.num_data_ranks
        sums = torch.zeros(2, dtype=torch.float64, device=strategy.device)
        with torch.no_grad():
            # Every rank makes equally many passes, or sharded layers would wait for each other.
            for part in micro_slices(
                0, -(-len(rows) // num_ranks), self.config.micro_train_batch_size
            ):
                chosen = rows[strategy.data_rank :: num_ranks][part]
                padded = pad(chosen or rows[:1], strategy.device, pixels=self._pixels)
                logprobs = self._score(padded).logprobs.double().sum()
                if chosen:
                    sums += torch.stack([logprobs, logprobs.new_tensor(_num_trained(chosen))])
        logprob, count = strategy.reduce_over_data(sums, "sum").tolist()
        loss = -logprob / count
        return {
            "eval/logprob": -loss,
            "eval/loss": loss,
            "eval/perplexity": perplexity(loss),
            "eval/num_rows": float(len(rows)),
        }
