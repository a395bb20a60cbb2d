"""Saving and loading all that a run needs to continue exactly where it was.

A run's checkpoints are `ckpt_path`/_actor, with its moving average, and with a critic
`ckpt_path`/_critic.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.run.state import TrainerState
from lightrft.stages.updates import TrainedModels
from lightrft.strategy.strategy_base import StrategyBase


def save_trainer(
    strategy: StrategyBase, config: TrainConfig, state: TrainerState, models: TrainedModels
) -> None:
    """Writes the models, their optimizers and schedulers, the generators, and the state.

    The critic comes first and is kept one longer: an actor checkpoint, which is what a load
    looks for, then always has its critic.
    """
    for trained in reversed(models.trained):
        is_actor = trained is models.actor
        strategy.save_ckpt(
            trained.model,
            str(Path(str(config.ckpt_path)) / f"_{trained.name}"),
            f"global_step{state.num_steps}",
            config.max_ckpt_num + (0 if is_actor else 1),
            math.ceil(config.max_ckpt_mem),
            state.to_client_state(),
            optimizer=trained.optimizer,
            scheduler=trained.scheduler,
            model_ema=models.ema_model if is_actor else None,
        )


def load_trainer(
    strategy: StrategyBase, config: TrainConfig, state: TrainerState, models: TrainedModels
) -> TrainerState | None:
    """Loads the newest step of which the checkpoints of all models are whole.

    Returns:
        The state of that checkpoint; None where there is none.

    Raises:
        CheckpointError: There are checkpoints, but none of them is whole.
    """
    folders = [str(Path(str(config.ckpt_path)) / f"_{item.name}") for item in models.trained]
    tag = strategy.find_ckpt(folders, lambda client_state: _require_state(state, client_state))
    restored = state
    for trained, folder in zip(models.trained, folders, strict=True) if tag is not None else ():
        _, client_state = strategy.load_ckpt(
            trained.model,
            folder,
            tag,
            optimizer=trained.optimizer,
            scheduler=trained.scheduler,
            model_ema=models.ema_model if trained is models.actor else None,
        )
        if trained is models.actor:
            restored = state.restored(client_state)
    return None if tag is None else restored


def _require_state(state: TrainerState, client_state: Mapping[str, object]) -> None:
    """Raises a ValueError unless a trainer wrote it, and continues nothing."""
    state.restored(client_state)
