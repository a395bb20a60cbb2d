"""Experiment trackers: asked for, checked before the run, and never the end of one."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightrft.config.toml import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightrft.config import TrainConfig
    from lightrft.trainer.reporting.loggers import MetricsLogger

logger = logging.getLogger(__name__)
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_id"


class TrackerError(RuntimeError):
    """A tracker that was asked for cannot be used; the message names the option."""


class ScalarWriter(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Takes one number."""
        ...

    def flush(self) -> None:
        """Writes what is pending."""
        ...

    def close(self) -> None:
        """Ends the file."""
        ...


class WandbRun(Protocol):
    """The part of a W&B run that is used."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""
        ...

    def finish(self) -> None:
        """Writes what is pending."""
        ...


class TensorBoardLogger:
    """Scalars for TensorBoard, readable after every step.

    Args:
        writer: `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes every finite number of a step."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


class WandbLogger:
    """Metrics for Weights & Biases.

    Args:
        run: What `wandb.init` returned.
    """

    def __init__(self, run: WandbRun) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the numbers of a step over."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run of the service."""
        self._run.finish()


class BestEffortLogger:
    """A logger whose first failure is told once and ends it, not the run."""

    def __init__(self, name: str, inner: MetricsLogger) -> None:
        self._name = name
        self._inner: MetricsLogger | None = inner

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics on while the logger works."""
        self._try(lambda inner: inner.log(step, metrics))

    def close(self) -> None:
        """Closes the logger."""
        self._try(lambda inner: inner.close())

    def _try(self, action: Callable[[MetricsLogger], None]) -> None:
        if self._inner is None:
            return
        try:
            action(self._inner)
        except Exception as error:
            self._inner = None
            logger.warning(
                "%s failed and gets nothing more, the run goes on: %s", self._name, error
            )
            logger.debug("why %s failed", self._name, exc_info=error)


def build_trackers(config: TrainConfig) -> list[MetricsLogger]:
    """The trackers that were asked for, ready to use; to be called on the first rank only.

    Raises:
        TrackerError: One cannot be used.
    """
    openers: tuple[tuple[str, object, Callable[[TrainConfig], MetricsLogger]], ...] = (
        ("use_tensorboard", config.use_tensorboard, _open_tensorboard),
        ("use_wandb", config.use_wandb, _open_wandb),
    )
    trackers: list[MetricsLogger] = []
    for option_name, is_used, open_tracker in openers:
        if not is_used:
            continue
        try:
            trackers.append(BestEffortLogger(option_name, open_tracker(config)))
        except Exception as error:
            raise TrackerError(
                f"--{option_name}: cannot be used: {error}; fix it or leave the option out"
            ) from error
    return trackers


def _open_tensorboard(config: TrainConfig) -> MetricsLogger:
    from torch.utils.tensorboard import SummaryWriter

    chosen = config.use_tensorboard
    folder = Path(chosen) if isinstance(chosen, str) else None
    writer = SummaryWriter(str(folder or Path(config.output_dir) / TENSORBOARD_FOLDER))
    return TensorBoardLogger(writer)


def _open_wandb(config: TrainConfig) -> MetricsLogger:
    import wandb

    if isinstance(config.use_wandb, str):
        os.environ["WANDB_API_KEY"] = config.use_wandb
    run = wandb.init(
        project=config.wandb_project,
        entity=config.wandb_org,
        group=config.wandb_group,
        name=time.strftime(config.wandb_run_name),
        id=_wandb_id(Path(config.output_dir)),
        resume="allow",
        dir=config.output_dir,
        config=without_secrets(config),
        settings=wandb.Settings(silent=True),
    )
    return WandbLogger(run)


def _wandb_id(folder: Path) -> str:
    """The id of the run, the same for all its parts."""
    path = folder / WANDB_ID_FILE
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
