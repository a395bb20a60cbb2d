"""Distillation from Python."""

from collections.abc import Callable, Sequence

from lightrft.config import TrainConfig
from lightrft.reporting.loggers import MetricsLogger
from lightrft.run.assembly import RunSummary, run_training


class DistillationTrainer:
    """A run of distillation; `lightrft distill` is the same from the command line.

    Args:
        config: Options of `lightrft distill`.
        loggers: Further receivers of metrics on the first rank.

    Raises:
        ConfigError: There is no teacher, or another advantage estimator was chosen.
    """

    def __init__(self, config: TrainConfig, *, loggers: Sequence[MetricsLogger] = ()) -> None:
        self.config, self.loggers = config.distilled(), loggers

    def train(self, *, stop_request: Callable[[], bool] | None = None) -> RunSummary:
        """Trains as one process of a run; arguments and errors as for `run_training`."""
        return run_training(
            self.config,
            stage=self.config.distillation_stage,
            loggers=self.loggers,
            stop_request=stop_request,
        )
