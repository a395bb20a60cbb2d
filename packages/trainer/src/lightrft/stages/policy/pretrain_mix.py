"""A language-modelling loss on other texts, mixed into every optimizer step of the actor.

Source: Ouyang et al. 2022 (InstructGPT, PPO-ptx), arXiv:2203.02155, eq. 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.config import TrainConfig
from lightrft.models.types import ActorOutput
from lightrft.records.batch import pad_rows
from lightrft.stages.metrics import StepMetrics

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class PretrainMix:
    """ptx_coef * mean over the tokens of a batch of texts of -log p(token).

    Args:
        texts: Token ids of each text, two or more; the same on every rank.
        coef: Weight of the loss.
        batch_size: Texts of one optimizer step, over all ranks.
        seed: Fixes the order of the texts in each pass over them.
    """

    texts: Sequence[Sequence[int]]
    coef: float
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.texts or self.batch_size < 1 or self.coef <= 0:
            raise ValueError(
                "a pre-training loss needs texts, batch_size >= 1 and a positive weight: got "
                f"{len(self.texts)}, {self.batch_size} and {self.coef}"
            )

    def rows(self, position: int) -> list[int]:
        """The texts of optimizer step `position` of the run, over all ranks."""
        first = position * self.batch_size
        places = [divmod(first + i, len(self.texts)) for i in range(self.batch_size)]
        orders = {
            number: np.random.default_rng([self.seed, number]).permutation(len(self.texts))
            for number in {number for number, _ in places}
        }
        return [int(orders[number][place]) for number, place in places]

    def shares(
        self,
        actor: nn.Module,
        position: int,
        strategy: StrategyBase,
        config: TrainConfig,
        metrics: StepMetrics,
    ) -> list[Callable[[], Tensor]]:
        """Micro batches of this rank; every rank gets equally many, empty ones included.

        Args:
            actor: Scores the texts.
            position: Optimizer steps of the actor before this one.
            strategy: Gives data-parallel rank, number of those, and device.
            config: Rows of one forward and backward pass.
            metrics: Receives `ptx_loss`.
        """
        rows, num_ranks = self.rows(position), strategy.num_data_ranks
        num_tokens = sum(len(self.texts[row]) - 1 for row in rows)
        own = rows[strategy.data_rank :: num_ranks]
        num_rows, size = -(-len(rows) // num_ranks), config.micro_train_batch_size
        metrics.add_mean("ptx_loss", 0.0, 1.0 / num_ranks)
        return [
            partial(
                self._share, actor, own[start : start + size], num_tokens, strategy.device, metrics
            )
            for start in range(0, num_rows, size)
        ]

    def _share(
        self,
        actor: nn.Module,
        rows: Sequence[int],
        num_tokens: int,
        device: torch.device,
        metrics: StepMetrics,
    ) -> Tensor:
        # A rank without rows looks at any text and multiplies by 0: backward is a collective.
        texts = [self.texts[row] for row in rows] or [self.texts[0]]
        token_ids, attention_mask = pad_rows(texts, device)
        output: ActorOutput = actor(token_ids, attention_mask, scored_mask=None)
        share = -output.logprobs.sum() * (1.0 if rows else 0.0) / num_tokens
        metrics.add_mean("ptx_loss", share, 0.0)
        return self.coef * share
