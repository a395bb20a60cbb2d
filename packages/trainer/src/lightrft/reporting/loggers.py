"""Receivers of the metrics of a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import LOGGERS

# Shown on the console line, in this order, where present.
CONSOLE_METRICS = (
    "reward",
    "policy_loss",
    "critic_loss",
    "kl",
    "entropy",
    "response_length",
    "grad_norm",
    "actor_lr",
    "logprob_diff_max",
    "step_seconds",
)


class MetricsLogger(Protocol):
    """A receiver of metrics. Only the first rank has loggers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one step; names with a slash belong to a group."""
        ...

    def close(self) -> None:
        """Writes what is pending."""
        ...


def own_loggers(config: TrainConfig) -> list[MetricsLogger]:
    """The user's loggers: each `CLASS(config)` of the option `loggers` that is no tracker's name.

    Raises:
        ConfigError: One cannot be loaded or built, or lacks `log` or `close`.
    """
    made = []
    for name in config.loggers:
        if LOGGERS.is_built_in(name):
            continue
        build = LOGGERS.load(name)
        try:
            logger = cast("Callable[[TrainConfig], MetricsLogger]", build)(config)
        except Exception as error:
            raise ConfigError(
                f"loggers: {name}(config) failed: {type(error).__name__}: {error}"
            ) from error
        if not all(callable(getattr(logger, method, None)) for method in ("log", "close")):
            raise ConfigError(f"loggers: {name} needs log(step, metrics) and close()")
        made.append(logger)
    return made


class ConsoleLogger:
    """One line of key=value pairs a step.

    Args:
        write: Prints one line.
        every: Steps between two lines; lines with evaluation results are always shown.
    """

    def __init__(self, write: Callable[[str], None], *, every: int = 1) -> None:
        self._write = write
        self._every = every

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of a step."""
        shown = [name for name in CONSOLE_METRICS if name in metrics]
        evaluated = sorted(name for name in metrics if name.startswith("eval/"))
        if evaluated or step % self._every == 0:
            parts = [f"{name}={metrics[name]:.4g}" for name in (*shown, *evaluated)]
            self._write(" ".join([f"step={step}", *parts]))

    def close(self) -> None:
        """Has nothing pending."""


class LoggerGroup:
    """Several loggers as one; none on all ranks but the first."""

    def __init__(self, loggers: Sequence[MetricsLogger] = ()) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics to every logger."""
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        """Closes every logger."""
        for logger in self._loggers:
            logger.close()
