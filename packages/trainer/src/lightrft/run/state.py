"""Progress of a run, and the checkpoints that hold it beside the models of the stage.

A run's checkpoints are `ckpt_path`/_NAME for each model that is trained; those of the main model
hold its moving average, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.config import TrainConfig
from lightrft.stages.stage import StageMemory, TrainedModels, stored_number

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class BestModel:
    """The best evaluation so far.

    Args:
        value: Of the metric; larger is better.
        step: After which it was reached; 0 is before training.
    """

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class LoopState:
    """Progress of a run.

    Args:
        num_steps: Completed steps.
        episode: Pass over the data that is under way.
        num_consumed: Items of that pass already used, over all ranks.
        best: The best evaluation so far, or None.
    """

    num_steps: int = 0
    episode: int = 0
    num_consumed: int = 0
    best: BestModel | None = None

    def to_client_state(self) -> dict[str, object]:
        """Plain values for `strategy.save_ckpt`."""
        return {
            "num_steps": self.num_steps,
            "episode": self.episode,
            "consumed_samples": self.num_consumed,
            "best": None if self.best is None else [self.best.value, self.best.step],
        }

    @classmethod
    def from_client_state(cls, client_state: Mapping[str, object]) -> LoopState:
        """The progress that a checkpoint holds.

        Raises:
            KeyError: A value is missing.
            ValueError: A value is of another kind.
        """
        best = client_state["best"]
        return cls(
            num_steps=int(stored_number(client_state, "num_steps")),
            episode=int(stored_number(client_state, "episode")),
            num_consumed=int(stored_number(client_state, "consumed_samples")),
            best=BestModel(float(best[0]), int(best[1])) if isinstance(best, list) else None,
        )


def read_client_state(
    client_state: Mapping[str, object], memory: StageMemory
) -> tuple[LoopState, StageMemory]:
    """Progress and the stage's memory of a checkpoint.

    Raises:
        ValueError: It was not written by a run of this stage.
    """
    try:
        return LoopState.from_client_state(client_state), memory.restored(client_state)
    except KeyError as error:
        raise ValueError(
            f"the checkpoint holds no trainer state: {error} is missing from its client state "
            f"(it has {sorted(client_state)}); load it with load_module_only, or start anew"
        ) from error


def save_run(
    strategy: StrategyBase,
    config: TrainConfig,
    client_state: Mapping[str, object],
    models: TrainedModels,
) -> None:
    """Writes the models, their optimizers and schedulers, the generators, and the client state.

    The main model comes last and the others are kept one longer: a checkpoint of the main model,
    which is what a load looks for, then always has theirs.
    """
    for trained in reversed(models.trained):
        is_main = trained is models.main
        strategy.save_ckpt(
            trained.model,
            str(Path(str(config.ckpt_path)) / f"_{trained.name}"),
            f"global_step{client_state['num_steps']}",
            config.max_ckpt_num + (0 if is_main else 1),
            math.ceil(config.max_ckpt_mem),
            client_state,
            optimizer=trained.optimizer,
            scheduler=trained.scheduler,
            model_ema=models.average if is_main else None,
        )


def load_run(
    strategy: StrategyBase, config: TrainConfig, memory: StageMemory, models: TrainedModels
) -> tuple[LoopState, StageMemory] | None:
    """Loads the newest step of which the checkpoints of all models are whole.

    Args:
        strategy, config: Where to read.
        memory: Of the stage before; says what a checkpoint must hold.
        models: Receive the states.

    Returns:
        Progress and memory of that checkpoint; None where there is none.

    Raises:
        CheckpointError: There are checkpoints, but none of them is whole.
    """
    folders = [str(Path(str(config.ckpt_path)) / f"_{item.name}") for item in models.trained]

    def accepts(client_state: Mapping[str, object]) -> None:
        read_client_state(client_state, memory)

    tag = strategy.find_ckpt(folders, accepts)
    found = None
    for trained, folder in zip(models.trained, folders, strict=True) if tag is not None else ():
        _, client_state = strategy.load_ckpt(
            trained.model,
            folder,
            tag,
            optimizer=trained.optimizer,
            scheduler=trained.scheduler,
            model_ema=models.average if trained is models.main else None,
        )
        if trained is models.main:
            found = read_client_state(client_state, memory)
    return found
