"""Observers of the values that the update of one step computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.registry import STEP_OBSERVERS
from lightrft.datasets.row_data import SupervisedRow
from lightrft.stages.stage import TrainedModels
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.algorithms.moments import Moments
    from lightrft.engines.base import RolloutEngine
    from lightrft.experience.maker import StepExperience
    from lightrft.strategy.backend import Backend

Facts = Mapping[str, NDArray[np.float64] | NDArray[np.bool_] | NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """Rows that a step is trained on, on all ranks.

    Args:
        items: Rows, grouped by comparison.
        places: Place in the data of each item; -1 if it is not in the data.
        num_items: Number of items of the data.
        facts: Facts of the data about the rows, by name: [rows], or [tokens] flat.
    """

    items: Sequence[Sequence[SupervisedRow]]
    places: Sequence[int]
    num_items: int
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """Step before its update, as an observer sees it.

    Args:
        stage: Name of the stage in `config.registry.STAGES`.
        number: Number of the step, counted from 1.
        num_planned: Steps of the whole run; 0 is unknown.
        config: Options of the run with the requested aggregation, which a paper may fix.
        backend: Gathers states and the parts of all ranks.
        engine: Engine that samples, or None.
        models: Models that are trained.
        data: Rows or samples to train on; samples are this rank's.
        kl_coef: Weight of the KL term; 0 without a reference model.
        moments: Moments of all rewards before the step, or None without running normalisation.
        prompt_ids: Ids of the run's prompts, in order; () is not known.
    """

    stage: str
    number: int
    num_planned: int
    config: TrainConfig
    backend: Backend
    engine: RolloutEngine | None
    models: TrainedModels
    data: ObservedRows | StepExperience
    kl_coef: float = 0.0
    moments: Moments | None = None
    prompt_ids: Sequence[int] = ()


class Observer(Protocol):
    """Receiver of the values that the update of one step computes."""

    def begin_update(self, model: str, normalizer: Tensor) -> None:
        """Note that micro-batches of an optimizer step follow, with Z over all ranks."""
        ...

    def micro_batch(
        self,
        ids: Sequence[int] | Tensor,
        attention_mask: Tensor,
        values: Mapping[str, Tensor | None],
        terms: Mapping[str, Tensor],
    ) -> None:
        """Note the results of a micro-batch's forward pass.

        Args:
            ids: Id of each row.
            attention_mask: [batch, seq] bool.
            values: Numbers by name, [batch, seq] or [batch]; None is absent. "new" are logprobs,
                values or scores of the pass, "weights" those of the tokens.
            terms: Share of the micro-batch in each term of the loss.
        """
        ...

    def end_update(self, result: OptimizerStepResult) -> None:
        """Note the result of an optimizer step."""
        ...

    def finish(self) -> None:
        """Complete the record after the last optimizer step; collective."""
        ...


def open_observer(step: ObservedStep) -> Observer:
    """Build the recorder of a step that is to be audited; collective."""
    return cast("Callable[[ObservedStep], Observer]", STEP_OBSERVERS.load("audit"))(step)
