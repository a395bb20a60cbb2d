"""Optimizer steps on supervised rows: -sum(log p of trained tokens) / their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow, SupervisedRows
from lightrft.experience.minibatches import MinibatchPlan, micro_slices, plan_minibatches
from lightrft.models.types import ActorOutput, TokenLossFunction
from lightrft.records.batch import pad_rows
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.models import configure_models
from lightrft.stages.stage import (
    Stage,
    Step,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one optimizer step.

    Args:
        rows: Of all ranks, the same on each.
        plan: Distributes them over the ranks.
    """

    rows: tuple[SupervisedRow, ...]
    plan: MinibatchPlan

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] tokens of each row."""
        return np.array([len(row.token_ids) for row in self.rows], dtype=np.int64)

    @property
    def trained(self) -> NDArray[np.int64]:
        """[rows] trained tokens of each row."""
        return np.array([row.num_trained for row in self.rows], dtype=np.int64)


class SupervisedStage(Stage[RowBatch]):
    """One optimizer step on `train_batch_size` rows, drawn anew in each pass over the data.

    loss = -sum_it m_it log p(token_it) / M, with M = sum m over all rows of the step: of all ranks
    and micro-batches.

    Args:
        config: Options of the run; what they leave to the machine is decided.
        strategy: Trains over ranks.
        models: One.
        data: To train on.
        held_out: To evaluate on.
    """

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
        configure_models(config, strategy, [models.main.model])
        size = config.train_batch_size // strategy.world_size
        self.loader = strategy.setup_dataloader(data, size, collate_fn=list)
        # A packed micro-batch holds what as many of the longest rows would.
        bound = config.micro_batch_tokens
        if bound is None and config.packing_samples:
            bound = config.micro_train_batch_size * config.max_row_tokens
        self._cut = config.replaced({"micro_batch_tokens": bound})

    def planned_steps(self) -> int:
        """See `Stage`."""
        return planned_updates(self.data, self.config, self.strategy)

    def draw(self, step: Step) -> RowBatch:
        """See `Stage`; every rank learns all rows, so that long ones are shared out evenly."""
        if step.data is None:
            raise RuntimeError("supervised steps draw their rows from a loader")
        own = cast("Sequence[int]", step.data.next_batch())
        shares: list[list[int]] = self.strategy.gather_objects(list(own))
        places = sorted(place for share in shares for place in share)
        rows = tuple(self.data.rows[place] for place in places)
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
        return RowBatch(rows, plan)

    def update(self, batch: RowBatch, step: Step) -> Work:
        """See `Stage`."""
        strategy, rank = self.strategy, self.strategy.data_rank
        own = [batch.rows[place] for place in batch.plan.row_index(rank)]
        count = torch.tensor(_num_trained(own), device=strategy.device)
        # Of the same masks as the loss. None at all is a loss of 0.
        normalizer = strategy.reduce_over_data(count, "sum").clamp(min=1.0)
        slices = batch.plan.micro_slices(
            batch.lengths,
            index=0,
            rank=rank,
            micro_batch_size=self.config.micro_train_batch_size,
            config=self._cut,
        )
        optimizer_step(
            self.models.main,
            [partial(self._share, own[part], normalizer, step.metrics) for part in slices],
            strategy=strategy,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        record_total("loss", strategy, step.metrics)
        return Work((self.models.main.name,), batch.lengths, batch.trained)

    def _share(
        self, rows: Sequence[SupervisedRow], normalizer: Tensor, metrics: StepMetrics
    ) -> Tensor:
        """The share of a micro-batch in the loss of the step."""

        def share_of(logprobs: Tensor, *_: object) -> Tensor:
            return -(logprobs.double().sum() / normalizer)

        # Inside the output projection where that is fused: the same number with less work.
        output = self._score(rows, share_of if self.config.fused_linear_logprob else None)
        share = share_of(output.logprobs) if output.loss is None else output.loss
        metrics.add_mean("loss", share, 0.0)
        return share

    def _score(
        self, rows: Sequence[SupervisedRow], token_loss: TokenLossFunction | None = None
    ) -> ActorOutput:
        """Logprobs of the trained tokens of some rows; 0 elsewhere."""
        token_ids, attention_mask, is_trained = self.tensors(rows)
        output: ActorOutput = self.models.main.model(
            token_ids, attention_mask, scored_mask=is_trained, token_loss=token_loss
        )
        return output

    def tensors(self, rows: Sequence[SupervisedRow]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, real tokens and trained tokens of some rows: [batch, seq]."""
        device = self.strategy.device
        token_ids, attention_mask = pad_rows([row.token_ids.tolist() for row in rows], device)
        is_trained = torch.zeros_like(attention_mask)
        flat = np.concatenate([row.is_trained for row in rows])
        is_trained[attention_mask] = torch.from_numpy(flat).to(device)
        return token_ids, attention_mask, is_trained

    def finish(self, batch: RowBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`."""
        num_tokens, num_trained = int(batch.lengths.sum()), int(batch.trained.sum())
        return metrics | {
            "perplexity": perplexity(metrics["loss"]),
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
                logprobs = self._score(chosen or rows[:1]).logprobs.double().sum()
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


def _num_trained(rows: Sequence[SupervisedRow]) -> float:
    return float(sum(row.num_trained for row in rows))


def perplexity(loss: float) -> float:
    """The exponential of a mean loss, which stays finite."""
    return math.exp(min(loss, 700.0))


def planned_updates(data: SupervisedRows, config: TrainConfig, strategy: StrategyBase) -> int:
    """Optimizer steps of a whole run: whole batches of each of `max_epochs` passes."""
    per_rank = len(data) // strategy.world_size
    total = per_rank * strategy.world_size // config.train_batch_size * config.max_epochs
    return total if config.max_steps is None else min(total, config.max_steps)
