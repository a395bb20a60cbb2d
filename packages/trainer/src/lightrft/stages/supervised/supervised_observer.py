"""Receivers of what a supervised update computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.registry import STEP_OBSERVERS
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.stages.stage import Step, TrainedModels
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of a micro-batch as a model is given them.

    Args:
        ids: Their places among the rows of the step.
        token_ids: [batch, seq] int64.
        attention_mask, is_trained: [batch, seq] bool.
    """

    ids: tuple[int, ...]
    token_ids: Tensor
    attention_mask: Tensor
    is_trained: Tensor


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """A step before its update, as observers are told.

    Args:
        number: Of the step, counted from 1.
        config: Of the run.
        strategy: Gathers states and the parts of all ranks.
        models: What is trained.
        rows: Of the step, on all ranks.
        num_planned: Steps of the whole run; 0 is unknown.
    """

    number: int
    config: TrainConfig
    strategy: StrategyBase
    models: TrainedModels
    rows: tuple[SupervisedRow, ...]
    num_planned: int


class RowObserver(Protocol):
    """A receiver of what the update of one step computes."""

    def begin_update(self, model: str, normalizer: Tensor) -> None:
        """Before the micro-batches of an optimizer step, with Z over all ranks."""
        return

    def micro_batch(self, rows: PaddedRows, logprobs: Tensor, terms: Mapping[str, Tensor]) -> None:
        """After the forward pass of a micro-batch.

        Args:
            rows: As the model saw them.
            logprobs: [batch, seq], 0 where nothing is trained.
            terms: Its share of each term of the loss.
        """
        return

    def end_update(self, result: OptimizerStepResult) -> None:
        """After an optimizer step."""
        return

    def finish(self) -> None:
        """After the last optimizer step; collective."""
        return


class NoRowObserver(RowObserver):
    """Nobody looks."""


def open_row_observer(
    config: TrainConfig,
    strategy: StrategyBase,
    models: TrainedModels,
    rows: Sequence[SupervisedRow],
    step: Step,
) -> RowObserver:
    """The recorder of a step that is to be audited; collective."""
    if config.audit_every <= 0 or step.number % config.audit_every:
        return NoRowObserver()
    build = cast("Callable[[ObservedRows], RowObserver]", STEP_OBSERVERS.load("supervised_audit"))
    return build(ObservedRows(step.number, config, strategy, models, tuple(rows), step.num_planned))
