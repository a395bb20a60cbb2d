"""Optimizer steps on the divergence of a student from its teacher on given rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.algorithms.kl import divergence
from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow, SupervisedRows
from lightrft.experience.teachers import LogprobServer
from lightrft.models.divergence import HeadReader, Projected, Targets, divergence_sum
from lightrft.models.types import ActorOutput
from lightrft.stages.distillation.own_samples import OwnSamples
from lightrft.stages.distillation.served_rows import ServedRows, ask_for_rows
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.rows.padded_rows import PaddedRows
from lightrft.stages.rows.row_observer import RowObserver
from lightrft.stages.rows.row_stage import RowBatch
from lightrft.stages.stage import Step, TrainedModels, Work
from lightrft.stages.supervised.supervised_stage import SupervisedStage
from lightrft.stages.teachers import is_own_teacher, require_zero

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


class DivergenceStage(SupervisedStage):
    """A supervised stage whose loss is the mean divergence over the trained tokens.

    Of several teachers by row each token is compared with its row's; their weights are in the sum,
    not in the denominator.

    Args:
        config, strategy, models, data, held_out: See `SupervisedStage`.
        teachers: Prepared models by name, the only one as "".
        servers: The served ones by name.
    """

    name = "divergence"
    kept_dropout = "adapters"

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        data: SupervisedRows,
        held_out: Sequence[SupervisedRow],
        *,
        teachers: Mapping[str, nn.Module],
        servers: Mapping[str, LogprobServer],
    ) -> None:
        self.teachers, self.servers = teachers, servers
        super().__init__(config, strategy, models, data, held_out)
        self.syncs_engine = config.offpolicy_fraction < 1
        self.proves_zero = False
        self._served: dict[str, ServedRows] = {}
        self._names: tuple[str, ...] = ()

    def draw(self, step: Step) -> RowBatch:
        """See `Stage`; the student completes some of the rows itself."""
        batch = super().draw(step)
        if not self.syncs_engine:
            return batch
        samples = OwnSamples(self.config, self.strategy)
        with step.timer.stage("rollout"):
            rows = samples.mixed(batch.rows, step.number)
        share = len(samples.chosen(len(rows), step.number)) / len(rows)
        step.metrics.add_mean("onpolicy_share", share, 1.0)
        return self.batch_of(rows, step.number)

    def update(self, batch: RowBatch, step: Step) -> Work:
        """See `Stage`; servers score the rows of the step here."""
        is_exact = is_own_teacher(self.config) and not self.config.lora_dropout
        self.proves_zero = is_exact and step.number == 1
        own = batch.plan.row_index(self.strategy.data_rank).tolist()
        self._names = tuple(row.teacher for row in batch.rows)
        with step.timer.stage("forward"):
            self._served = {
                name: ask_for_rows(
                    server,
                    {place: batch.rows[place] for place in own if self._names[place] == name},
                    self.strategy.context,
                    top_k=self.config.teacher_top_k or 1,
                )
                for name, server in self.servers.items()
            }
        return super().update(batch, step)

    def close(self) -> None:
        """Ends the connections to servers."""
        for server in self.servers.values():
            server.close()

    def _share(
        self,
        padded: PaddedRows,
        normalizer: Tensor,
        metrics: StepMetrics,
        observer: RowObserver,
    ) -> Tensor:
        inputs = (padded.token_ids, padded.attention_mask)
        sums: list[Tensor] = []

        def run_student(teachers: Mapping[str, Targets]) -> Tensor:
            """The student's pass within the teachers': all have their output weights then."""
            reader = HeadReader(lambda student: self._divergence(student, teachers, padded))
            with torch.enable_grad():
                output: ActorOutput = self.models.main.model(
                    *inputs, scored_mask=padded.is_trained, token_loss=reader
                )
            if output.loss is None:
                raise RuntimeError("the student's output projection gave no loss")
            sums.append(output.loss)
            return normalizer.new_zeros(())

        def run(names: Sequence[str], found: Mapping[str, Targets]) -> Tensor:
            if not names:
                return run_student(found)
            name, *rest = names
            reader = HeadReader(lambda projected: run(rest, {**found, name: projected}))
            self.teachers[name](*inputs, scored_mask=padded.is_trained, token_loss=reader)
            return normalizer.new_zeros(())

        with torch.no_grad():
            run(list(self.teachers), {})
        share = sums[0] / normalizer
        observer.micro_batch(padded, None, {"policy": share})
        metrics.add_mean("loss", share, 0.0)
        return share

    def _divergence(
        self, student: Projected, teachers: Mapping[str, Targets], padded: PaddedRows
    ) -> Tensor:
        """The weighted sum over this rank's tokens of the divergence from their teachers."""
        loss = partial(divergence, form=self.config.teacher_form, beta=self.config.teacher_beta)
        factors = self.config.teacher_factors
        if not self.servers and list(teachers) == [""]:
            return divergence_sum(student, teachers[""], loss)
        if student.rows is None:
            raise RuntimeError("teachers by row are told apart by the places of tokens")
        names = [self._names[padded.ids[row]] for row in student.rows.tolist()]
        total = student.hidden.new_zeros((), dtype=torch.float64)
        for name, factor in factors.items():
            is_own = torch.tensor([each == name for each in names], dtype=torch.bool)
            index = is_own.nonzero().flatten().to(student.hidden.device)
            own = student.at(index)
            targets = (
                self._served[name].targets(padded.ids, own)
                if name in self._served
                else teachers[name].at(index)
            )
            total = total + factor * divergence_sum(own, targets, loss)
        return total

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
