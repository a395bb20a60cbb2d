"""Weights & Biases."""

import os
import time
from pathlib import Path

from lightrft.config import OutputOptions
from lightrft.config.toml import without_secrets
from lightrft.reporting.trackers.best_effort import BestEffortLogger, kept_id

ID_FILE = "wandb_id"


def open_wandb(config: OutputOptions) -> BestEffortLogger:
    """Open a run of W&B, the same one for all parts of a run."""
    import wandb

    if isinstance(config.use_wandb, str):
        os.environ["WANDB_API_KEY"] = config.use_wandb
    run = wandb.init(
        project=config.wandb_project,
        entity=config.wandb_org,
        group=config.wandb_group,
        name=time.strftime(config.wandb_run_name),
        id=kept_id(Path(config.output_dir), ID_FILE),
        resume="allow",
        dir=config.output_dir,
        config=without_secrets(config),
        settings=wandb.Settings(silent=True),
    )
    return BestEffortLogger(
        "use_wandb", lambda step, metrics: run.log(dict(metrics), step=step), run.finish
    )
