"""One optimizer step from micro-batches, whose losses are divided by a denominator of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor

from lightrft.stages.alarms import MAIN_NAMES
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.stage import TrainedModel
from lightrft.strategy.distributed.console_sink import with_progress
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.optimizers import OptimizerStepResult

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


def optimizer_step(
    trained: TrainedModel,
    shares: Sequence[Callable[[], Tensor]],
    *,
    strategy: StrategyBase,
    metrics: StepMetrics,
    timeout_minutes: float,
) -> OptimizerStepResult:
    """One optimizer step from the losses of its micro-batches, each computed in its turn.

    The gradient is that of the sum of all shares over micro-batches and ranks, so each share is
    divided by the denominator Z of the whole optimizer batch (`strategy.reduce_over_data`).

    Args:
        trained: What is updated.
        shares: The loss of each micro-batch; every rank has equally many.
        strategy: Trains over ranks.
        metrics: Receives norm, learning rate and what was not finite.
        timeout_minutes: Deadline of each micro-batch.

    Raises:
        RuntimeError: The optimizer did not act on the last micro-batch.
    """
    model, optimizer = trained.model, trained.optimizer
    result = None
    with strategy.accumulation(len(shares), optimizer):
        for share in with_progress(shares, f"train {trained.name}"):
            with phase("train", timedelta(minutes=timeout_minutes)):
                loss = share()
                metrics.add_count("nonfinite/losses", (~loss.detach().isfinite()).sum())
                strategy.backward(loss, model, optimizer)
                result = strategy.optimizer_step(
                    optimizer, model, trained.scheduler, name=trained.name
                )
    if result is None:
        raise RuntimeError(
            f"the optimizer of the {trained.name} did not act on the last micro batch of its batch"
        )
    _record(trained.name, result, metrics)
    return result


def record_total(name: str, strategy: StrategyBase, metrics: StepMetrics) -> None:
    """Counts one optimizer step of a metric whose shares were added with the count 0."""
    metrics.add_mean(name, 0.0, 1.0 / strategy.num_data_ranks)


def _record(name: str, result: OptimizerStepResult, metrics: StepMetrics) -> None:
    prefix = "" if name in MAIN_NAMES else f"{name}_"
    is_finite = 0.0 if result.is_skipped else 1.0
    metrics.add_mean(f"{prefix}grad_norm", result.grad_norm if is_finite else 0.0, is_finite)
    metrics.add_mean(f"{name}_lr", result.learning_rate, 1.0)
    metrics.add_mean(f"{prefix}skipped_steps", 1.0 - is_finite, 1.0)
    metrics.add_mean(f"{prefix}zero_gradient_share", float(result.grad_norm == 0.0), 1.0)
