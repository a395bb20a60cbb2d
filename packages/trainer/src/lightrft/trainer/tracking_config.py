"""Options of where the progress of a run is shown and recorded."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.strategy.config import StrategyConfig, option


@dataclass(kw_only=True)
class TrackingConfig(StrategyConfig):
    """Options of the console and of experiment trackers."""

    use_tensorboard: str | bool | None = option(
        False, "Write TensorBoard logs, into this folder or OUTPUT_DIR/tensorboard.",
        group="monitoring",
    )  # fmt: skip
    use_wandb: str | bool | None = option(
        False, "Log to Weights & Biases; a key given here is neither shown nor saved, without one "
        "WANDB_API_KEY or an earlier login counts.", group="monitoring",
    )  # fmt: skip
    wandb_org: str | None = option(None, "W&B entity.", group="monitoring")
    wandb_group: str | None = option(None, "W&B group.", group="monitoring")
    wandb_project: str = option("lightrft_train_ppo", "W&B project.", group="monitoring")
    wandb_run_name: str = option(
        "ppo_%m%dT%H:%M", "W&B name of the run; %-codes are those of strftime.", group="monitoring"
    )
    heartbeat_seconds: float = option(
        60.0, "Say which phase is under way after so long without a line.", group="monitoring",
        above=0,
    )  # fmt: skip
