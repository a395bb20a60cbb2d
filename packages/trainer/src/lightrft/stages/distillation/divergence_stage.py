"""Optimizer steps on the divergence of a student from its teacher on given rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.algorithms.kl import divergence
from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow, SupervisedRows
from lightrft.models.divergence import HeadReader, Projected, divergence_sum
from lightrft.models.types import ActorOutput
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.models import configure_models, is_deterministic
from lightrft.stages.policy.teacher import is_own_teacher, require_zero
from lightrft.stages.stage import Step, TrainedModels, Work
from lightrft.stages.supervised.supervised_stage import (
    PaddedRows,
    RowBatch,
    RowObserver,
    SupervisedStage,
)

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


class DivergenceStage(SupervisedStage):
    """A supervised stage whose loss is the mean divergence over the trained tokens.

    Args:
        config, strategy, models, data, held_out: See `SupervisedStage`.
        teacher: Prepared.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        data: SupervisedRows,
        held_out: Sequence[SupervisedRow],
        *,
        teacher: nn.Module,
    ) -> None:
        super().__init__(config, strategy, models, data, held_out)
        configure_models(config, strategy, [teacher])
        self.teacher = teacher
        self.proves_zero = False

    def update(self, batch: RowBatch, step: Step) -> Work:
        """See `Stage`."""
        model = self.strategy.unwrap_model(self.models.main.model)
        is_exact = is_own_teacher(self.config) and is_deterministic(model)
        self.proves_zero = is_exact and step.number == 1
        return super().update(batch, step)

    def _share(
        self,
        padded: PaddedRows,
        normalizer: Tensor,
        metrics: StepMetrics,
        observer: RowObserver,
    ) -> Tensor:
        del observer
        form, beta = self.config.teacher_form, self.config.teacher_beta
        sums: list[Tensor] = []

        def run_student(teacher: Projected) -> Tensor:
            """The student's pass within the teacher's: both have their output weights then."""

            def read(student: Projected) -> Tensor:
                loss = partial(divergence, form=form, beta=beta)
                return divergence_sum(student, teacher, loss)

            with torch.enable_grad():
                output: ActorOutput = self.models.main.model(
                    padded.token_ids,
                    padded.attention_mask,
                    scored_mask=padded.is_trained,
                    token_loss=HeadReader(read),
                )
            if output.loss is None:
                raise RuntimeError("the student's output projection gave no loss")
            sums.append(output.loss)
            return teacher.hidden.new_zeros(())

        with torch.no_grad():
            self.teacher(
                padded.token_ids,
                padded.attention_mask,
                scored_mask=padded.is_trained,
                token_loss=HeadReader(run_student),
            )
        share = sums[0] / normalizer
        metrics.add_mean("loss", share, 0.0)
        return share

    def finish(self, batch: RowBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`; a divergence has no perplexity.

        Raises:
            ParityError: A model was found to differ from itself.
        """
        if self.proves_zero:
            require_zero(abs(metrics["loss"]), self.config, self.strategy)
        found = super().finish(batch, metrics)
        del found["perplexity"]
        return found
