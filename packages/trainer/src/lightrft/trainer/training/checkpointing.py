"""Saving and loading all that a run needs to continue exactly where it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.training.state import TrainerState
from lightrft.trainer.training.updates import TrainedModel


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints of one run: `<folder>/_actor` and, with a critic, `<folder>/_critic`.

    Args:
        strategy: Writes and reads.
        folder: Where.
        max_num: Keep at most this many.
        max_mem: Keep at most this many MB.
        average: The actor's moving average, stored with it; None is absent.
    """

    strategy: StrategyBase
    folder: Path
    max_num: int
    max_mem: float
    average: nn.Module | None = None

    def save(self, state: TrainerState, actor: TrainedModel, critic: TrainedModel | None) -> None:
        """Writes the models, their optimizers and schedulers, the generators, and the state.

        The critic comes first and is kept one longer: an actor checkpoint, which is what a load
        looks for, then always has its critic.
        """
        tag = f"global_step{state.num_steps}"
        client_state = state.to_client_state()
        if critic is not None:
            self._save_model("_critic", critic, tag, client_state, max_num=self.max_num + 1)
        self._save_model(
            "_actor", actor, tag, client_state, max_num=self.max_num, average=self.average
        )

    def load(
        self, state: TrainerState, actor: TrainedModel, critic: TrainedModel | None
    ) -> TrainerState | None:
        """Loads the newest complete checkpoint into the models.

        Returns:
            The state of that checkpoint; None where there is none.
        """
        if not (self.folder / "_actor").is_dir():
            return None
        _, client_state = self.strategy.load_ckpt(
            actor.model,
            str(self.folder / "_actor"),
            optimizer=actor.optimizer,
            scheduler=actor.scheduler,
            model_ema=self.average,
        )
        restored = state.restored(client_state)
        if critic is not None:
            self.strategy.load_ckpt(
                critic.model,
                str(self.folder / "_critic"),
                f"global_step{restored.num_steps}",
                optimizer=critic.optimizer,
                scheduler=critic.scheduler,
            )
        return restored

    def _save_model(
        self,
        name: str,
        trained: TrainedModel,
        tag: str,
        client_state: Mapping[str, object],
        *,
        max_num: int,
        average: nn.Module | None = None,
    ) -> None:
        self.strategy.save_ckpt(
            trained.model,
            str(self.folder / name),
            tag,
            max_num,
            math.ceil(self.max_mem),
            dict(client_state),
            optimizer=trained.optimizer,
            scheduler=trained.scheduler,
            model_ema=average,
        )
