"""Learning from preferences from Python."""

from collections.abc import Callable, Sequence

from lightrft.config import TrainConfig
from lightrft.reporting.loggers import MetricsLogger
from lightrft.run.assembly import RunSummary, run_training


class PreferenceTrainer:
    """A run of learning from preferences; `lightrft prefer` is the same from the command line.

    Args:
        config: Options of `lightrft prefer`.
        loggers: Further receivers of metrics on the first rank.
    """

    def __init__(self, config: TrainConfig, *, loggers: Sequence[MetricsLogger] = ()) -> None:
        self.config, self.loggers = config, loggers

    def train(self, *, stop_request: Callable[[], bool] | None = None) -> RunSummary:
        """Trains as one process of a run; arguments and errors as for `run_training`."""
        return run_training(
            self.config, stage="prefer", loggers=self.loggers, stop_request=stop_request
        )
