"""SwanLab: offline in the run's folder; `SWANLAB_MODE` chooses otherwise."""

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

FOLDER, ID_FILE = "swanlab", "swanlab_id"


def open_swanlab(config: OutputOptions) -> BestEffortLogger:
    """Open a run of SwanLab; offline, each part of a run has a folder, and all have one id."""
    import swanlab

    folder = Path(config.output_dir).resolve()
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    with told_to_log("swanlab"):
        run = swanlab.init(
            project=config.wandb_project,
            workspace=config.wandb_org,
            name=folder.name,
            group=config.wandb_group,
            id=kept_id(folder, ID_FILE),
            resume="allow",
            config=without_secrets(config),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            log_dir=str(folder / FOLDER),
            # Standard output belongs to the run's console.
            settings=swanlab.Settings(terminal={"proxy_type": "none"}, interactive=False),
        )

    return quiet_logger("swanlab", run.log, run.finish)
