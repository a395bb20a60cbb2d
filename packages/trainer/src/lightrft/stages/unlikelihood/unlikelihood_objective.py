"""Objective of unlikelihood training: a mean over the tokens of good and of bad answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import aggregate
from lightrft.datasets.preference_rows import Preference
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.rows.row_objective import LossShare, RowBatch, RowObjective
from lightrft.stages.rows.row_passes import MicroBatch, RowPart

# A token of probability 1 would have an infinite loss.
_LEAST_COMPLEMENT = 1e-5


@dataclass(frozen=True, slots=True)
class UnlikelihoodObjective(RowObjective[Preference, int]):
    """loss = sum_it m_it l_it / M, with M = sum m over all rows of the step, on all ranks.

    l is that of `unlikelihood_loss`.
    """

    name: ClassVar[str] = "unlikelihood"

    def measure(self, part: RowPart[Preference], number: int = 0) -> int:
        """Count the tokens of all answers; every rank knows all items."""
        return sum(row.num_trained for item in part.items for row in item.rows)

    def normalizer(self, part: RowPart[Preference], known: int) -> Tensor:
        """Return the denominator of the loss, []."""
        return torch.tensor(float(known))

    def share(self, micro: MicroBatch[Preference], known: int, metrics: StepMetrics) -> LossShare:
        """Compute the share of a micro-batch in the loss."""
        rows = micro.rows
        logprobs = micro.passes.score(rows).logprobs
        labels = [is_good for item in micro.items for is_good in item.labels]
        is_good = torch.tensor(labels, device=logprobs.device)[:, None]
        losses = unlikelihood_loss(logprobs.double(), is_good)
        share = aggregate(losses, rows.is_trained, "token-mean", float(known))
        metrics.add_masked_mean("chosen_logprob", logprobs, rows.is_trained & is_good)
        metrics.add_masked_mean("rejected_logprob", logprobs, rows.is_trained & ~is_good)
        return LossShare(share, {"policy": share}, rows, logprobs)

    def finish(
        self, batch: RowBatch[Preference, int], metrics: dict[str, float]
    ) -> dict[str, float]:
        """Complete the metrics of a step."""
        return metrics | {"num_tokens": float(sum(batch.lengths))}


def unlikelihood_loss(logprobs: Tensor, is_good: Tensor) -> Tensor:
    """Compute the loss of each token: l = -log p of a good answer, -log(1 - p) of a bad one.

    Source: Welleck et al. 2019, arXiv:1908.04319, eq. 4 with alpha = 1; negatives are the rows'.

    Args:
        logprobs: [rows, seq].
        is_good: [rows, 1] bool.
    """
    complement = -torch.expm1(logprobs)
    return -torch.where(is_good, logprobs, complement.clamp(min=_LEAST_COMPLEMENT).log())
