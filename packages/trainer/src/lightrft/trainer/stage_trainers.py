"""Whole runs of the stages over rows from Python; commands of lightrft do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from lightrft.config import TrainConfig
from lightrft.reporting.loggers import MetricsLogger
from lightrft.run.assembly import RunSummary, run_training


class StageTrainer:
    """A run of one stage.

    Args:
        config: Options of the command.
        loggers: Further receivers of metrics on the first rank.
    """

    stage: ClassVar[str]

    def __init__(self, config: TrainConfig, *, loggers: Sequence[MetricsLogger] = ()) -> None:
        self.config, self.loggers = config, loggers

    def train(self, *, stop_request: Callable[[], bool] | None = None) -> RunSummary:
        """Train as one process of a run; arguments and errors as for `run_training`."""
        return run_training(
            self.config, stage=self.stage, loggers=self.loggers, stop_request=stop_request
        )


class SFTTrainer(StageTrainer):
    """A run of supervised fine-tuning, as `lightrft sft`; see `StageTrainer`."""

    stage = "sft"


class PreferenceTrainer(StageTrainer):
    """A run of learning from preferences, as `lightrft prefer`; see `StageTrainer`."""

    stage = "prefer"


class RewardTrainer(StageTrainer):
    """A run that trains a reward model, as `lightrft reward`; see `StageTrainer`."""

    stage = "reward"


class DistillationTrainer(StageTrainer):
    """A run of distillation, as `lightrft distill`; see `StageTrainer`.

    Raises:
        ConfigError: There is no teacher, or another advantage estimator was chosen.
    """

    def __init__(self, config: TrainConfig, *, loggers: Sequence[MetricsLogger] = ()) -> None:
        super().__init__(config.distilled(), loggers=loggers)

    @property
    def stage(self) -> str:  # type: ignore[override]
        """The stage that the options choose."""
        return self.config.distillation_stage
