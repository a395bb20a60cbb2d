"""A learning rate schedule's position on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.strategy.checkpoints.client_state import load_state, save_state
from lightrft.strategy.checkpoints.manifest import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.checkpoints.file_writers import FileWriter

SCHEDULER_NAME = "scheduler"


def save_scheduler(folder: Path, scheduler: LRScheduler, files: FileWriter) -> None:
    """Write a schedule's position."""
    save_state(folder / SCHEDULER_NAME, scheduler.state_dict(), files=files)


def load_scheduler(folder: Path, scheduler: LRScheduler) -> None:
    """Read a schedule's position.

    Raises:
        CheckpointError: The checkpoint has none.
    """
    if not (folder / f"{SCHEDULER_NAME}.json").is_file():
        raise CheckpointError(
            f"{folder} holds no scheduler: load it with load_lr_scheduler_states=False"
        )
    scheduler.load_state_dict(load_state(folder / SCHEDULER_NAME))
