"""Objective of supervised training: a mean over the trained tokens of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import local_normalizer, loss_weights
from lightrft.algorithms.supervised_losses import LOSSES, SupervisedLoss
from lightrft.config import RowRunOptions
from lightrft.datasets.row_data import SupervisedRow
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.rows.row_objective import Known, LossShare, RowBatch, RowObjective
from lightrft.stages.rows.row_passes import MicroBatch, RowPart
from lightrft.stages.stage import KeptDropout


@dataclass(frozen=True, slots=True)
class SupervisedObjective(RowObjective[SupervisedRow, Tensor]):
    """loss = -sum_it m_it log p(token_it) / M, with M = sum m; `sft_loss` names others.

    Sums run over all rows of the step, on all ranks.

    Args:
        loss: Loss of a token, and its aggregation.
        is_fused: Compute the loss inside the output projection, with the same result and less work.
    """

    name: ClassVar[str] = "sft"
    # Dropout stays on: the loss is not compared with anything.
    kept_dropout: ClassVar[KeptDropout] = "model"

    loss: SupervisedLoss = LOSSES["token-mean"]
    is_fused: bool = False

    @classmethod
    def of(cls, config: RowRunOptions) -> SupervisedObjective:
        """Build the objective from the options."""
        return cls(LOSSES[config.sft_loss], bool(config.fused_linear_logprob))

    def measure(self, part: RowPart[SupervisedRow], number: int = 0) -> Tensor:
        """Compute the denominator of the loss over all ranks, []."""
        return count_trained(part, self.loss.aggregation)

    def normalizer(self, part: RowPart[SupervisedRow], known: Tensor) -> Tensor:
        """Return the denominator of the loss, []."""
        return known

    def share(
        self,
        micro: MicroBatch[SupervisedRow],
        known: Tensor,
        metrics: StepMetrics,
    ) -> LossShare:
        """Compute the share of a micro-batch in the loss."""
        padded = micro.rows
        weights = loss_weights(padded.is_trained, self.loss.aggregation, dtype=torch.float64)

        def share_of(logprobs: Tensor, _: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
            return self.loss.share(logprobs, weights[rows, columns], known)

        output = micro.passes.score(padded, share_of if self.is_fused else None)
        share = output.loss
        if share is None:
            share = self.loss.share(output.logprobs, weights, known)
        if self.loss is not LOSSES["token-mean"]:
            metrics.add_masked_mean("nll", -output.logprobs, padded.is_trained)
        return LossShare(share, {"policy": share}, padded, output.logprobs)

    def finish(
        self, batch: RowBatch[SupervisedRow, Tensor], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Complete the metrics of a step."""
        loss = metrics.get("nll", metrics["loss"])
        return metrics | {"perplexity": perplexity(loss)} | row_metrics(batch)

    def evaluate(self, part: RowPart[SupervisedRow]) -> dict[str, float]:
        """Compute metrics of held-out rows."""
        return evaluate_rows(part)


def count_trained(part: RowPart[SupervisedRow], aggregation: str) -> Tensor:
    """Compute the denominator of a loss over all ranks, []; collective.

    Args:
        part: Rows of a step or an evaluation.
        aggregation: Mode of `lightrft.algorithms.aggregation`.
    """
    masks = [torch.from_numpy(row.is_trained)[None] for row in part.local_items]
    counts = [local_normalizer(mask, aggregation) for mask in masks[: part.num_counted]]
    total = sum(counts, torch.zeros((), dtype=torch.float64))
    return part.passes.context.reduce_over_data(total.to(part.passes.device), "sum")


def evaluate_rows(part: RowPart[SupervisedRow]) -> dict[str, float]:
    """Compute loss and perplexity over all trained tokens of some rows; collective."""
    plain = SupervisedObjective()
    metrics = plain.mean_shares(part, plain.measure(part))
    loss = metrics["loss"]
    return {"logprob": -loss, "loss": loss, "perplexity": perplexity(loss)}


def row_metrics(batch: RowBatch[SupervisedRow, Known]) -> dict[str, float]:
    """Return the number of tokens of a step, and their trained share."""
    num_tokens = sum(batch.lengths)
    return {
        "num_tokens": float(num_tokens),
        "trained_share": sum(batch.num_trained) / num_tokens,
    }


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss, kept finite."""
    return math.exp(min(loss, 700.0))
