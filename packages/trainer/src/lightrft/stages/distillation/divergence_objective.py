"""Objective of distillation on rows: the divergence of a student from its teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from lightrft.algorithms.kl import divergence
from lightrft.datasets.row_data import SupervisedRow
from lightrft.experience.teachers import LogprobServer, TextScores
from lightrft.models.divergence import Targets, divergence_sum
from lightrft.models.types import ActorOutput, HeadReader, Projected
from lightrft.stages.distillation.own_samples import chosen_places, mixed_rows
from lightrft.stages.distillation.served_rows import ask_for_rows, served_targets
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.rows.row_objective import LossShare, RowBatch, RowObjective
from lightrft.stages.rows.row_passes import MicroBatch, RowPart, RowPasses
from lightrft.stages.stage import Step
from lightrft.stages.supervised.supervised_objective import (
    count_trained,
    evaluate_rows,
    row_metrics,
)
from lightrft.stages.teachers import is_own_teacher, require_zero

if TYPE_CHECKING:
    from lightrft.strategy.engine.session import EngineSession


@dataclass(frozen=True, slots=True)
class KnownTeachers:
    """Data about the rows of a step that are known before its update.

    Args:
        count: [] trained tokens of all ranks.
        names: Name of each row's teacher.
        served: Answers of servers about this rank's rows, by teacher.
        is_zero: Student and teacher are one model, so the divergence must be 0.
    """

    count: Tensor
    names: tuple[str, ...]
    served: Mapping[str, Mapping[int, TextScores]]
    is_zero: bool = False


@dataclass(frozen=True, slots=True)
class DivergenceObjective(RowObjective[SupervisedRow, KnownTeachers]):
    """Mean divergence over the trained tokens.

    With several teachers each token is compared with the teacher of its row. The teachers' weights
    multiply the sum, not the denominator.

    Args:
        teachers: Prepared models by name; "" is the only one.
        servers: Served teachers by name.
        syncs_engine: The student completes some rows, so an engine follows it.
    """

    name: ClassVar[str] = "divergence"
    measured_as: ClassVar[str | None] = "forward"

    teachers: Mapping[str, nn.Module]
    servers: Mapping[str, LogprobServer]
    syncs_engine: bool = False

    @property
    def frozen(self) -> Sequence[nn.Module]:
        """Models of the teachers."""
        return tuple(self.teachers.values())

    def drawn(
        self,
        items: tuple[SupervisedRow, ...],
        step: Step,
        passes: RowPasses,
        session: EngineSession,
    ) -> tuple[SupervisedRow, ...]:
        """Let the student complete some of the rows; collective."""
        with step.timer.stage("rollout"):
            rows = mixed_rows(passes, session, items, step.number)
        share = len(chosen_places(passes.config, len(rows), step.number)) / len(rows)
        step.metrics.add_mean("onpolicy_share", share, 1.0)
        return rows

    def measure(self, part: RowPart[SupervisedRow], number: int = 0) -> KnownTeachers:
        """Count tokens, and let servers score the rows; collective."""
        config, names = part.passes.config, tuple(row.teacher for row in part.items)
        local = {place: part.items[place] for place in part.places.tolist()}
        served = {
            name: ask_for_rows(
                server,
                {place: row for place, row in local.items() if row.teacher == name},
                part.passes.context,
                top_k=config.teacher_top_k or 1,
            )
            for name, server in self.servers.items()
        }
        is_zero = number == 1 and is_own_teacher(config) and not config.lora_dropout
        return KnownTeachers(count_trained(part, "token-mean"), names, served, is_zero)

    def normalizer(self, part: RowPart[SupervisedRow], known: KnownTeachers) -> Tensor:
        """Return the number of trained tokens, []."""
        return known.count

    def share(
        self,
        micro: MicroBatch[SupervisedRow],
        known: KnownTeachers,
        metrics: StepMetrics,
    ) -> LossShare:
        """Compute the share of a micro-batch in the loss."""
        padded = micro.rows
        inputs, count = (padded.token_ids, padded.attention_mask), known.count
        sums: list[Tensor] = []

        def run_student(teachers: Mapping[str, Targets]) -> Tensor:
            """Run the student inside the teachers' passes, with all output weights gathered."""
            reader = HeadReader(lambda student: self._divergence(student, teachers, micro, known))
            with torch.enable_grad():
                output: ActorOutput = micro.passes.model(
                    *inputs, scored_mask=padded.is_trained, token_loss=reader
                )
            if output.loss is None:
                raise RuntimeError("the student's output projection gave no loss")
            sums.append(output.loss)
            return count.new_zeros(())

        def run(names: Sequence[str], targets: Mapping[str, Targets]) -> Tensor:
            if not names:
                return run_student(targets)
            name, *rest = names
            reader = HeadReader(lambda projected: run(rest, {**targets, name: projected}))
            self.teachers[name](*inputs, scored_mask=padded.is_trained, token_loss=reader)
            return count.new_zeros(())

        with torch.no_grad():
            run(list(self.teachers), {})
        share = sums[0] / count
        return LossShare(share, {"policy": share}, padded)

    def _divergence(
        self,
        student: Projected,
        teachers: Mapping[str, Targets],
        micro: MicroBatch[SupervisedRow],
        known: KnownTeachers,
    ) -> Tensor:
        """Sum the weighted divergence of this rank's tokens from their teachers."""
        config, padded = micro.passes.config, micro.rows
        loss = partial(divergence, form=config.teacher_form, beta=config.teacher_beta)
        if not self.servers and list(teachers) == [""]:
            return divergence_sum(student, teachers[""], loss)
        if student.rows is None:
            raise RuntimeError("teachers by row are told apart by the places of tokens")
        names = [known.names[padded.ids[row]] for row in student.rows.tolist()]
        total = student.hidden.new_zeros((), dtype=torch.float64)
        for name, factor in config.teacher_factors.items():
            is_its_token = torch.tensor([each == name for each in names], dtype=torch.bool)
            index = is_its_token.nonzero().flatten().to(student.hidden.device)
            tokens = student.at(index)
            targets = (
                served_targets(known.served[name], padded.ids, tokens)
                if name in known.served
                else teachers[name].at(index)
            )
            total = total + factor * divergence_sum(tokens, targets, loss)
        return total

    def finish(
        self,
        batch: RowBatch[SupervisedRow, KnownTeachers],
        metrics: dict[str, float],
    ) -> dict[str, float]:
        """Complete the metrics of a step.

        Raises:
            ParityError: A model differs from itself.
        """
        if batch.known.is_zero:
            passes = batch.part.passes
            require_zero(abs(metrics["loss"]), passes.config, passes.context)
        return metrics | row_metrics(batch)

    def evaluate(self, part: RowPart[SupervisedRow]) -> dict[str, float]:
        """Compute metrics of held-out rows."""
        return evaluate_rows(part)

    def close(self) -> None:
        """End the connections to servers."""
        for server in self.servers.values():
            server.close()
