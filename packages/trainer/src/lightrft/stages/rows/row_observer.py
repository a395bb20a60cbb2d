"""Observers of optimizer steps on given rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.registry import STEP_OBSERVERS
from lightrft.datasets.row_data import SupervisedRow
from lightrft.stages.rows.padded_rows import PaddedRows
from lightrft.stages.stage import Batch, Stage, Step, TrainedModels
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase

Facts = Mapping[str, NDArray[np.float64] | NDArray[np.bool_] | NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """A step before its update, as observers are told.

    Args:
        stage: Name in `config.registry.STAGES`.
        number: Of the step, counted from 1.
        config: Of the run.
        strategy: Gathers states and the parts of all ranks.
        models: What is trained.
        items: Rows of the step, on all ranks; those that are compared with each other together.
        places: Place in the data of each item; -1 of one that is not there.
        num_items: Items of the data.
        num_planned: Steps of the whole run; 0 is unknown.
        facts: What the data say of them, by name: [rows], or [tokens] flat.
    """

    stage: str
    number: int
    config: TrainConfig
    strategy: StrategyBase
    models: TrainedModels
    items: Sequence[Sequence[SupervisedRow]]
    places: Sequence[int]
    num_items: int
    num_planned: int
    facts: Facts = field(default_factory=dict)


class RowObserver:
    """A receiver of what the update of one step computes; this one keeps nothing."""

    def begin_update(self, model: str, normalizer: Tensor) -> None:
        """Before the micro-batches of an optimizer step, with Z over all ranks."""
        return

    def micro_batch(
        self,
        rows: PaddedRows,
        values: Tensor | None,
        terms: Mapping[str, Tensor],
        reference: Tensor | None = None,
    ) -> None:
        """After the forward pass of a micro-batch.

        Args:
            rows: As the model saw them; trained are the tokens that have a value.
            values: [batch, seq] logprobs or scores, 0 elsewhere; None where the stage has none.
            terms: Its share of each term of the loss.
            reference: [batch] sums of each row's logprobs under a reference; None without one.
        """
        return

    def end_update(self, result: OptimizerStepResult) -> None:
        """After an optimizer step."""
        return

    def finish(self) -> None:
        """After the last optimizer step; collective."""
        return


def open_row_observer(
    name: str,
    stage: Stage[Batch],
    step: Step,
    items: Sequence[Sequence[SupervisedRow]],
    data: Iterable[Sequence[SupervisedRow]],
    facts: Callable[[], Facts] = dict,
) -> RowObserver:
    """The recorder of a step that is to be audited; collective.

    Args:
        name: Of the stage.
        stage: Trains.
        step: Under way.
        items: Rows of the step, those that are compared with each other together.
        data: All items to train on, read where the step is recorded.
        facts: Gives what the data say of them.
    """
    config = stage.config
    if config.audit_every <= 0 or step.number % config.audit_every:
        return RowObserver()
    build = cast("Callable[[ObservedRows], RowObserver]", STEP_OBSERVERS.load("row_audit"))
    # By the rows themselves: how the stage came to them is what the audit asks.
    first_rows = [rows[0] for rows in data]
    known = {id(row): place for place, row in enumerate(first_rows)}
    places = [known.get(id(rows[0]), -1) for rows in items]
    seen = (name, step.number, config, stage.strategy, stage.models, items, places, len(first_rows))
    return build(ObservedRows(*seen, step.num_planned, facts()))
