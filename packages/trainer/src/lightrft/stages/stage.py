"""The protocol of a training stage, which `lightrft.run.loop` carries out, and its optimizer steps.

A stage costs a class here and an entry of `config.registry.STAGES`. It gets checkpoints, exact
resume, evaluation, logs, alarms, the best model, stops and the report from the loop.
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
from lightrft.datasets.batch_stream import Batches, BatchStream
from lightrft.reporting.alarms import MAIN_NAMES, alarms
from lightrft.stages.metrics import StepMetrics
from lightrft.strategy.backend import PreparedModel
from lightrft.strategy.distributed.console_sink import with_progress
from lightrft.strategy.distributed.deadlines import StepTimer, phase
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.datasets.row_data import SupervisedRow
    from lightrft.strategy.backend import Backend
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.model_training import ModelTraining
    from lightrft.strategy.strategy_base import StrategyBase


Batch = TypeVar("Batch")
# Dropout that acts in a stage: all that the model's configuration asks for, that of adapters, none.
KeptDropout = Literal["model", "adapters", "none"]
NO_LENGTHS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model with what updates it; its name begins its metrics and names its checkpoints."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None

    @property
    def prepared(self) -> PreparedModel:
        """The same as checkpoints take it."""
        return PreparedModel(self.model, self.optimizer, self.scheduler)


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """Models of a stage that optimizers update.

    Args:
        trained: The first is the main one: it is saved as the result, and an engine follows it.
        average: The main model's moving average, or None.
    """

    trained: tuple[TrainedModel, ...]
    average: nn.Module | None = None

    @property
    def main(self) -> TrainedModel:
        """The first."""
        return self.trained[0]

    def named(self, name: str) -> TrainedModel | None:
        """Return the model of that name, or None."""
        return next((each for each in self.trained if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Step:
    """One step under way: its place in the run, its data, and what measures it.

    Args:
        number: Number of the step, counted from 1.
        data: This rank's batches from the position of the run on; None without a loader.
        num_planned: Steps of the whole run; 0 is unknown.
        is_first: No step of this process came before it.
        metrics: Receives numbers that are reduced over all ranks after the update.
        timer: Receives durations.
    """

    number: int
    data: BatchStream[object] | None = None
    num_planned: int = 0
    is_first: bool = False
    metrics: StepMetrics = field(default_factory=StepMetrics)
    timer: StepTimer = field(default_factory=StepTimer)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of an update.

    Args:
        models: Names of the models that learn in this step.
        lengths, scored_lengths: Tokens of each row of all ranks, and those whose outputs count; no
            rows where nothing was computed, or where a model's operations are not counted.
        num_passes: Over these rows.
    """

    models: tuple[str, ...]
    lengths: NDArray[np.int64] = field(default_factory=lambda: NO_LENGTHS)
    scored_lengths: NDArray[np.int64] = field(default_factory=lambda: NO_LENGTHS)
    num_passes: int = 1


class StageMemory:
    """Memory of a stage between steps, beside its models; frozen. This one is empty."""

    def to_client_state(self) -> dict[str, object]:
        """Return plain values for a checkpoint; their names are those of no other part."""
        return {}

    def restored(self, client_state: Mapping[str, object]) -> Self:
        """Return the memory with the values of a checkpoint.

        Raises:
            KeyError: A value is missing.
            ValueError: A value is of another kind.
        """
        return self

    def rows(self) -> list[tuple[str, str]]:
        """Return name and state of each thing remembered, for the table of a continued run."""
        return []


class Stage(Protocol, Generic[Batch]):
    """One kind of training; subclasses say only what differs from these defaults.

    Args:
        config: Options of the run.
        strategy: Trains over ranks.
        models: What is trained.
        memory: What is remembered between steps; goes into checkpoints.
        loader: This rank's batches of items, one list a step; None where callers pass them.
        text_part: What is saved beside the model (tokenizer or processor), or None.
        syncs_engine: The rollout engine follows the main model.
        item_name: Word for what the loader gives, in the plural.
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
        """Return the steps of a whole run, those before a resume included."""
        ...

    def draw(self, step: Step) -> Batch:
        """Return the batch of one step; collective, with the models in evaluation mode."""
        ...

    def update(self, batch: Batch, step: Step) -> Work:
        """Return all optimizer steps of one step; collective, with the models in training mode."""
        ...

    def finish(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """Remember what the next step needs, and complete the metrics.

        Args:
            batch: Batch of the step.
            metrics: The step's numbers over all ranks.

        Returns:
            These metrics and those that every rank knows without communication.
        """
        return metrics

    def client_state(self) -> dict[str, object]:
        """Return what a checkpoint holds of the memory, complete on the first rank; collective."""
        return self.memory.to_client_state()

    def evaluate(self) -> dict[str, float]:
        """Metrics `eval/...` of held-out data, equal on all ranks; {} without; collective."""
        return {}

    def alarms(self, metrics: Mapping[str, float]) -> list[str]:
        """Return one sentence for each thing that is wrong with the metrics of a step."""
        return alarms(self.config, metrics)

    def resumed(self) -> None:
        """Adapt to a loaded checkpoint, once the engine has the weights."""
        return

    def prove_saved(self, folder: Path) -> None:
        """Prove that the written model is the trained one, where that can be told; collective.

        Args:
            folder: Holds the result of the run.

        Raises:
            ModelLoadError: It is not.
        """
        return

    def close(self) -> None:
        """Close files."""
        return


class StageInputs(Protocol):
    """Inputs of a stage, read and checked before any process group or model exists."""

    def decided(self, config: TrainConfig, backend: Backend) -> TrainConfig:
        """Return the configuration with what its options leave to the machine; collective."""
        ...

    def build(self, config: TrainConfig, strategy: StrategyBase) -> Stage[object]:
        """Models, engine and data of the stage."""
        ...

    def items(self) -> Sequence[Sequence[SupervisedRow]]:
        """Rows to train on, those that are compared together; none where they are sampled."""
        ...

    def media_digests(self) -> Iterable[bytes]:
        """A hash of each medium of the rows or prompts to train on, in order; files are read."""
        ...

    def close(self) -> None:
        """End processes that were started."""
        ...


def last_sampled_step(step: Step, config: StreamingOptions) -> int:
    """Return the last step that is sampled before a step is trained on."""
    last = step.number + config.rollout_lag
    return min(last, step.num_planned) if step.num_planned >= step.number else last


def stored_number(client_state: Mapping[str, object], name: str) -> float:
    """Return a number of a checkpoint's client state.

    Raises:
        KeyError: It is missing.
        ValueError: It is no number.
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
    """Return one optimizer step from the losses of its micro-batches, each computed in its turn.

    The gradient is that of the sum of all shares over micro-batches and ranks, so each share is
    divided by the denominator Z of the whole optimizer batch, over all ranks
    (`DistributedContext.reduce_over_data`).

    Args:
        trained: What is updated.
        shares: The loss of each micro-batch; every rank has equally many.
        training: Prepared the model.
        metrics: Receives norm, learning rate and what was not finite.
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
