"""Trackio: a SQLite file in the run's folder; `TRACKIO_DIR` chooses another folder."""

import os
from pathlib import Path

from lightrft.config import OutputOptions
from lightrft.config.toml import without_secrets
from lightrft.reporting.trackers.best_effort import (
    BestEffortLogger,
    kept_id,
    quiet_logger,
    told_to_log,
)

FOLDER, ID_FILE = "trackio", "trackio_id"


def open_trackio(config: OutputOptions) -> BestEffortLogger:
    """Open a run of Trackio, the same one for all parts of a run."""
    folder = Path(config.output_dir)
    # Read when the package is imported.
    os.environ.setdefault("TRACKIO_DIR", str((folder / FOLDER).resolve()))
    import trackio

    with told_to_log("trackio"):
        run = trackio.init(
            project=config.wandb_project,
            group=config.wandb_group,
            # Trackio identifies a run by its name.
            name=f"{folder.resolve().name}-{kept_id(folder, ID_FILE)}",
            config=without_secrets(config),
            resume="allow",
            embed=False,
        )

    return quiet_logger("trackio", run.log, trackio.finish)
