"""Receivers of the metrics of a step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO, cast

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import LOGGERS
from lightrft.config.toml import write_whole
from lightrft.reporting.files import parse_object

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


class JsonLinesFile:
    """A file of JSON objects, one a line, opened at the first line and flushed after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, entry: Mapping[str, object]) -> None:
        """Writes one line, so that a killed run keeps it."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLinesLogger(JsonLinesFile):
    """Appends one JSON object a step: {"step": 3, "policy_loss": ...}.

    Numbers that JSON does not have (NaN, infinity) become null.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the line of a step."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append({"step": step, **values})


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


def drop_steps_after(path: Path, step: int) -> None:
    """Removes the lines of later steps, which a resumed run is about to write again.

    Lines that are no object with a step, such as one cut off by a kill, are removed, too.
    """
    if not path.exists():
        return
    kept: list[str] = []
    # Not splitlines(): JSON leaves U+2028 and the like as they are within a text.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        found = parse_object(line).get("step")
        if isinstance(found, int) and found <= step:
            kept.append(line + "\n")
    write_whole(path, "".join(kept))
