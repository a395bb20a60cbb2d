"""The interface every training strategy implements, and what all of them share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from lightrft.engines.types import EngineStatus
from lightrft.strategy.distributed.sequence_parallel import SPDataProcessor
from lightrft.strategy.engine.interface import EngineInterface
from lightrft.strategy.optimizers import OptimizerStepResult
from lightrft.strategy.prepared import (
    ModelOptimPair,
    ModelOrModelOptimPair,
    PreparedModel,
    is_actor,
    is_engine,
)

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.prepared import Arguments

__all__ = [
    "EngineStatus",
    "ModelOptimPair",
    "ModelOrModelOptimPair",
    "PreparedModel",
    "StrategyBase",
    "is_actor",
    "is_engine",
]


class StrategyBase(EngineInterface):
    """How models are trained over ranks, and the rollout engine that shares the processes.

    Its methods stand in four layers, each in its own file: `DistributedContext` (processes and
    collectives), `TrainingInterface` (what a backend implements), `ModelPreparation` and
    `EngineInterface`. Usable as a context manager, which closes it.

    Args:
        seed: Seed of all random number generators.
        max_norm: Global gradient norm above which gradients are scaled down; 0 never clips.
        micro_train_batch_size: Samples per rank in one forward and backward pass.
        train_batch_size: Samples per optimizer step over all ranks.
        args: Further settings; kept as given, and read through `config`.

    Raises:
        ValueError: Sizes do not divide; the message has the numbers.
        RuntimeError: The launcher's environment variables are missing.
    """

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self.setup_distributed(timeout=self._timeout)
        self.engine_mp_group, self.engine_dp_group = self._create_engine_groups()
        self.sp_data_processor = SPDataProcessor(self._group_or_alone(self.sp_group))
        self._start_session()

    def _conclude_step(
        self, norm: float, scheduler: LRScheduler | None, name: str, learning_rate: float
    ) -> OptimizerStepResult:
        """The schedule advances, and the engine becomes stale, only with weights that changed."""
        is_skipped = not math.isfinite(norm)
        if is_skipped:
            self.num_skipped_steps[name] += 1
        else:
            if scheduler is not None:
                scheduler.step()
            self._mark_engine_stale()
        return OptimizerStepResult(norm, is_skipped, learning_rate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
