"""Observers of an update: receivers of what it computes, of which the audit's recorder is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from lightrft.algorithms.moments import Moments
from lightrft.config import TrainConfig
from lightrft.config.registry import STEP_OBSERVERS
from lightrft.experience.maker import StepExperience
from lightrft.records.batch import ExperienceBatch
from lightrft.stages.stage import TrainedModels
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step before its update, as observers are told.

    Args:
        number: Of the step, counted from 1.
        config: Of the run, as it was asked for: an observer knows a paper's aggregation itself.
        strategy: Gathers states and the parts of all ranks.
        models: What is trained.
        experience: What is trained on.
        kl_coef: Weight of the KL term; 0 without a reference model.
        moments: Of all rewards before the step, or None without running normalisation.
        num_updates: Optimizer steps of the whole run; 0 is unknown.
    """

    number: int
    config: TrainConfig
    strategy: StrategyBase
    models: TrainedModels
    experience: StepExperience
    kl_coef: float
    moments: Moments | None
    num_updates: int


class StepObserver(Protocol):
    """A receiver of what the update of one step computes."""

    def begin_update(
        self, model: str, batch: ExperienceBatch, normalizer: Tensor, weights: Tensor | None
    ) -> None:
        """Before the micro batches of an optimizer step.

        Args:
            model: "actor" or "critic".
            batch: This rank's rows.
            normalizer: Z over all ranks.
            weights: [batch, seq] of the tokens, or None where all are 1.
        """
        ...

    def micro_batch(
        self,
        batch: ExperienceBatch,
        values: Tensor,
        terms: Mapping[str, Tensor],
        old_logprobs: Tensor | None = None,
    ) -> None:
        """After the forward pass of a micro batch.

        Args:
            batch: Its rows.
            values: [batch, seq] logprobs, or values of a critic.
            terms: Its share of each term of the loss.
            old_logprobs: [batch, seq], with which they are compared.
        """
        ...

    def end_update(self, result: OptimizerStepResult) -> None:
        """After an optimizer step."""
        ...

    def finish(self) -> None:
        """After the last optimizer step; collective."""
        ...


class NoObserver:
    """Nobody looks."""

    def begin_update(
        self, model: str, batch: ExperienceBatch, normalizer: Tensor, weights: Tensor | None
    ) -> None:
        """Nothing."""

    def micro_batch(
        self,
        batch: ExperienceBatch,
        values: Tensor,
        terms: Mapping[str, Tensor],
        old_logprobs: Tensor | None = None,
    ) -> None:
        """Nothing."""

    def end_update(self, result: OptimizerStepResult) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


def open_observer(name: str, step: ObservedStep) -> StepObserver:
    """The observer of that name, ready for the update; collective."""
    build = cast("Callable[[ObservedStep], StepObserver]", STEP_OBSERVERS.load(name))
    return build(step)
