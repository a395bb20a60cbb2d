"""Protocol of a training stage, which `lightrft.run.loop` runs, and its optimizer steps.

A stage needs a class here and an entry in `config.registry.STAGES`. The loop provides checkpoints,
exact resume, evaluation, logs, alarms, the best model, stops and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import StreamingOptions, TrainConfig
from lightrft.datasets.batch_stream import Batches, Draws
from lightrft.datasets.prompt_sampler import GroupResult
from lightrft.reporting.alarms import MAIN_NAMES, alarms
from lightrft.stages.metrics import StepMetrics
from lightrft.strategy.backend import PreparedModel
from lightrft.strategy.distributed.context import with_progress
from lightrft.strategy.distributed.deadlines import StepTimer, phase
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.datasets.row_data import SupervisedRow
    from lightrft.strategy.backend import Backend
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.model_training import ModelTraining
    from lightrft.strategy.strategy_base import StrategyBase


Batch = TypeVar("Batch")
# Dropout of a stage: all that the model's configuration has, only that of adapters, or none.
KeptDropout = Literal["model", "adapters", "none"]
NO_LENGTHS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Model with its optimizer; the name is a prefix of its metrics and its checkpoint's name."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None

    @property
    def prepared(self) -> PreparedModel:
        """Model and optimizer in the form of checkpoints."""
        return PreparedModel(self.model, self.optimizer, self.scheduler)


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """Models of a stage that optimizers update.

    Args:
        trained: Models; the first is saved as the result, and an engine follows it.
        average: Moving average of the main model, or None.
    """

    trained: tuple[TrainedModel, ...]
    average: nn.Module | None = None

    @property
    def main(self) -> TrainedModel:
        """First model."""
        return self.trained[0]

    def named(self, name: str) -> TrainedModel | None:
        """Return the model of that name, or None."""
        return next((each for each in self.trained if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Step:
    """Step in progress: its place in the run, its data, metrics and timer.

    Args:
        number: Number of the step, counted from 1.
        data: This rank's batches from the run's position on; None without a loader.
        num_planned: Steps of the whole run; 0 is unknown.
        is_first: Whether it is the first step of this process.
        metrics: Receives numbers that are reduced over all ranks after the update.
        timer: Receives durations.
    """

    number: int
    data: Draws[object] | None = None
    num_planned: int = 0
    is_first: bool = False
    metrics: StepMetrics = field(default_factory=StepMetrics)
    timer: StepTimer = field(default_factory=StepTimer)

    def is_due(self, every: int) -> bool:
        """Return whether work that is done every so many steps is due; 0 is never."""
        return every > 0 and self.number % every == 0


@dataclass(frozen=True, slots=True)
class Work:
    """Work of an update.

    Args:
        models: Names of the models that learn in this step.
        lengths, scored_lengths: Tokens of each row of all ranks, and those whose outputs count; no
            rows where nothing was computed, or where a model's operations are not counted.
        num_passes: Passes over these rows.
    """

    models: tuple[str, ...]
    lengths: NDArray[np.int64] = field(default_factory=lambda: NO_LENGTHS)
    scored_lengths: NDArray[np.int64] = field(default_factory=lambda: NO_LENGTHS)
    num_passes: int = 1


class StageMemory:
    """Memory of a stage between steps, beside its models; frozen. This one is empty."""

    def to_client_state(self) -> dict[str, object]:
        """Return plain values for a checkpoint; no other part uses their names."""
        return {}

    def restored(self, client_state: Mapping[str, object]) -> Self:
        """Return the memory with the values of a checkpoint.

        Raises:
            KeyError: A value is missing.
            ValueError: A value is of another kind.
        """
        return self

    def rows(self) -> list[tuple[str, str]]:
        """Return name and state of each value, for the table of a continued run."""
        return []


class Stage(Protocol, Generic[Batch]):
    """Kind of training; subclasses define only what differs from these defaults.

    Args:
        config: Options of the run.
        strategy: Trains over ranks.
        models: Models to train.
        memory: State between steps; goes into checkpoints.
        loader: This rank's batches of items, one list a step; None where callers pass them.
        text_part: Tokenizer or processor to save beside the model, or None.
        syncs_engine: Whether the rollout engine follows the main model.
        item_name: Plural word for the loader's items.
        kept_dropout: Dropout that acts while the models are updated.
    """

    config: TrainConfig
    strategy: StrategyBase
    models: TrainedModels
    memory: StageMemory = StageMemory()
    loader: Batches[object] | None = None
    text_part: object | None = None
    syncs_engine: bool = False
    item_name: str = "rows"
    kept_dropout: KeptDropout = "adapters"

    def planned_steps(self) -> int:
        """Return the number of steps of the whole run, including those before a resume."""
        ...

    def draw(self, step: Step) -> Batch:
        """Return the batch of one step; collective, with the models in evaluation mode."""
        ...

    def update(self, batch: Batch, step: Step) -> Work:
        """Take all optimizer steps of one step; collective, with the models in training mode."""
        ...

    def finish(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """Update the memory and complete the metrics.

        Args:
            batch: Batch of the step.
            metrics: The step's numbers over all ranks.

        Returns:
            These metrics and further ones that every rank knows without communication.
        """
        return metrics

    def results(self, batch: Batch) -> Sequence[GroupResult]:
        """Return the outcomes of a step's rows for the sampler, equal on all ranks."""
        return ()

    def client_state(self) -> dict[str, object]:
        """Return the memory's state for a checkpoint, complete on the first rank; collective."""
        return self.memory.to_client_state()

    def evaluate(self) -> dict[str, float]:
        """Return metrics `eval/...` of held-out data, equal on all ranks, or {}; collective."""
        return {}

    def alarms(self, metrics: Mapping[str, float]) -> list[str]:
        """Return one sentence for each thing that is wrong with the metrics of a step."""
        return alarms(self.config, metrics)

    def resumed(self) -> None:
        """Adapt to a loaded checkpoint, once the engine has the weights."""
        return

    def prove_saved(self, folder: Path) -> None:
        """Prove that the written model is the trained one, where possible; collective.

        Args:
            folder: Folder with the result of the run.

        Raises:
            ModelLoadError: The models differ.
        """
        return

    def close(self) -> None:
        """Close files."""
        return


class StageInputs(Protocol):
    """Inputs of a stage, read and checked before any process group or model exists."""

    def decided(self, config: TrainConfig, backend: Backend) -> TrainConfig:
        """Return the configuration with the machine's choices made; collective."""
        ...

    def build(self, config: TrainConfig, strategy: StrategyBase) -> Stage[object]:
        """Build models, engine and data of the stage."""
        ...

    def items(self) -> Sequence[Sequence[SupervisedRow]]:
        """Return the rows to train on, grouped by comparison; () if they are sampled."""
        ...

    def media_digests(self) -> Iterable[bytes]:
        """Return a hash of each medium to train on, in order; reads files."""
        ...

    def close(self) -> None:
        """End the processes that it started."""
        ...


def last_sampled_step(step: Step, config: StreamingOptions) -> int:
    """Return the last step to sample before a step is trained on."""
    last = step.number + config.rollout_lag
    return min(last, step.num_planned) if step.num_planned >= step.number else last


def stored_number(client_state: Mapping[str, object], name: str) -> float:
    """Return a number of a checkpoint's client state.

    Raises:
        KeyError: It is missing.
        ValueError: It is not a number.
    """
    value = client_state[name]
    if not isinstance(value, int | float):
        raise ValueError(f"expected a number in the checkpoint's client state, got {value!r}")
    return value


def optimizer_step(
    trained: TrainedModel,
    shares: Sequence[Callable[[], Tensor]],
    *,
    training: ModelTraining,
    metrics: StepMetrics,
    timeout_minutes: float,
    before_step: Callable[[], None] = lambda: None,
) -> OptimizerStepResult:
    """Take one optimizer step on the losses of its micro-batches, computed one by one.

    The gradient is that of the sum of all shares over micro-batches and ranks. So each share must
    be divided by the denominator Z of the whole optimizer batch, over all ranks
    (`DistributedContext.reduce_over_data`).

    Args:
        trained: Model to update.
        shares: Functions that compute a micro-batch's loss; every rank has equally many.
        training: Strategy part that prepared the model.
        metrics: Receives norm, learning rate and counts of non-finite losses.
        timeout_minutes: Deadline of each micro-batch.
        before_step: Called when the gradient is complete and no weight has changed.

    Raises:
        RuntimeError: The optimizer did not act on the last micro-batch.
    """
    model, optimizer = trained.model, trained.optimizer
    result = None
    with training.accumulation(len(shares), optimizer):
        for number, share in enumerate(with_progress(shares, f"train {trained.name}"), start=1):
            with phase("train", timedelta(minutes=timeout_minutes)):
                loss = share()
                metrics.add_count("nonfinite/losses", (~loss.detach().isfinite()).sum())
                training.backward(loss, model, optimizer)
                if number == len(shares):
                    before_step()
                result = training.optimizer_step(
                    optimizer, model, trained.scheduler, name=trained.name
                )
    if result is None:
        raise RuntimeError(
            f"the optimizer of the {trained.name} did not act on the last micro batch of its batch"
        )
    _record(trained.name, result, metrics)
    return result


def record_total(name: str, context: DistributedContext, metrics: StepMetrics) -> None:
    """Count one optimizer step of a metric whose shares were added with the count 0."""
    metrics.add_mean(name, 0.0, 1.0 / context.num_data_ranks)


def _record(name: str, result: OptimizerStepResult, metrics: StepMetrics) -> None:
    prefix = "" if name in MAIN_NAMES else f"{name}_"
    is_finite = 0.0 if result.is_skipped else 1.0
    metrics.add_mean(f"{prefix}grad_norm", result.grad_norm if is_finite else 0.0, is_finite)
    metrics.add_mean(f"{name}_lr", result.learning_rate, 1.0)
    metrics.add_mean(f"{prefix}skipped_steps", 1.0 - is_finite, 1.0)
    metrics.add_mean(f"{prefix}zero_gradient_share", float(result.grad_norm == 0.0), 1.0)
