"""Experiment trackers: asked for, checked before the run, and never the end of one."""

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.config.toml import without_secrets
from lightrft.trainer.reporting.loggers import MetricsLogger

logger = logging.getLogger(__name__)
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_id"


class TrackerError(RuntimeError):
    """A tracker that was asked for cannot be used; the message names the option."""


class BestEffortLogger:
    """A tracker whose first failure is told once and ends it, not the run.

    Args:
        name: The option that asked for it.
        send: Takes step and metrics.
        end: Writes what is pending.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[int, Mapping[str, float]], object],
        end: Callable[[], object],
    ) -> None:
        self._name, self._send, self._end = name, send, end
        self._has_failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics on while the tracker works."""
        self._try(lambda: self._send(step, metrics))

    def close(self) -> None:
        """Closes the tracker."""
        self._try(self._end)

    def _try(self, action: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:
            self._has_failed = True
            logger.warning(
                "%s failed and gets nothing more, the run goes on: %s", self._name, error
            )
            logger.debug("why %s failed", self._name, exc_info=error)


def build_trackers(config: TrainConfig) -> list[MetricsLogger]:
    """The trackers that were asked for, ready to use; to be called on the first rank only.

    Raises:
        TrackerError: One cannot be used.
    """
    trackers: list[MetricsLogger] = []
    for name, open_tracker in (("use_tensorboard", _open_tensorboard), ("use_wandb", _open_wandb)):
        if not getattr(config, name):
            continue
        try:
            trackers.append(open_tracker(config))
        except Exception as error:
            raise TrackerError(
                f"--{name}: cannot be used: {error}; fix it or leave the option out"
            ) from error
    return trackers


def _open_tensorboard(config: TrainConfig) -> BestEffortLogger:
    """Scalars for TensorBoard, the finite ones, readable after every step."""
    from torch.utils.tensorboard import SummaryWriter

    chosen = config.use_tensorboard
    folder = chosen if isinstance(chosen, str) else f"{config.output_dir}/{TENSORBOARD_FOLDER}"
    writer = SummaryWriter(folder)

    def send(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)
        writer.flush()

    return BestEffortLogger("use_tensorboard", send, writer.close)


def _open_wandb(config: TrainConfig) -> BestEffortLogger:
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
    return BestEffortLogger(
        "use_wandb", lambda step, metrics: run.log(dict(metrics), step=step), run.finish
    )


def _wandb_id(folder: Path) -> str:
    """The id of the run, the same for all its parts."""
    path = folder / WANDB_ID_FILE
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
