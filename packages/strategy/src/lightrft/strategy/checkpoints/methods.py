"""save_ckpt and load_ckpt: the same for every backend but for the state itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightrft.strategy.checkpoints.average_files import load_average, save_average
from lightrft.strategy.checkpoints.folders import SaveRequest, find_checkpoint
from lightrft.strategy.checkpoints.rank_group import RankGroup
from lightrft.strategy.checkpoints.saver import CheckpointSaver
from lightrft.strategy.distributed.collectives import gather_objects, group_size
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.checkpoints.file_writers import FileWriter
    from lightrft.strategy.checkpoints.manifest import Checkpoint
    from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel


@dataclass(frozen=True, slots=True)
class WantedState:
    """What a load reads besides the weights.

    Args:
        strict: Missing or unexpected weights are errors.
        optimizer, scheduler: Read those too.
    """

    strict: bool
    optimizer: bool
    scheduler: bool


class CheckpointMethods(StrategyBase):
    """A strategy whose checkpoints are folders of ours around files of the backend."""

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self._ranks = RankGroup(self.get_rank(), self.world_size, self.gather_objects)
        self._saver = CheckpointSaver(
            self._ranks, self._make_background_ranks if self.config.async_save else None
        )

    @abstractmethod
    def _write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """Writes this rank's part of model, optimizer and schedule. May be collective."""

    @abstractmethod
    def _read_state(
        self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState
    ) -> None:
        """Reads what `_write_state` wrote. May be collective."""

    def _checkpoint_details(self) -> Mapping[str, int | str]:
        """What must be the same in a run that loads a checkpoint of this one."""
        return {}

    def _make_background_ranks(self) -> RankGroup:
        """A group of its own, so that a save never meets the collectives of training."""
        group = self.world_group
        if group_size(group) > 1:
            group = dist.new_group(backend="gloo", timeout=self._timeout)
        return RankGroup(self.get_rank(), self.world_size, lambda item: gather_objects(item, group))

    def save_ckpt(  # noqa: PLR0913 - the published interface
        self,
        model: AnyModel,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        model_ema: AnyModel | None = None,
    ) -> None:
        """Writes a checkpoint; see `StrategyBase.save_ckpt`."""
        found = self._resolve(model, optimizer, scheduler)
        request = SaveRequest(
            save_dir=Path(save_dir),
            strategy=type(self).__name__,
            tag=tag,
            max_num=max_num,
            max_mem=max_mem,
            client_state=client_state or {},
            save_latest=save_latest,
            details=self._checkpoint_details(),
        )

        def write(folder: Path, files: FileWriter) -> None:
            self._write_state(folder, found, files)
            if model_ema is not None:
                average = self.parameter_source(model_ema)
                values = self._averages.values(average)
                save_average(folder, average, values, files, rank=self.get_rank())

        with phase("save a checkpoint", self._timeout):
            self._saver.save(request, write)

    def load_ckpt(  # noqa: PLR0913 - the published interface
        self,
        model: AnyModel,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        model_ema: AnyModel | None = None,
    ) -> tuple[str, dict[str, object]]:
        """Reads a checkpoint; see `StrategyBase.load_ckpt`."""
        found = self._resolve(model, optimizer, scheduler)
        reads_all = not load_module_only
        wanted = WantedState(
            strict=load_module_strict,
            optimizer=reads_all and load_optimizer_states and found.optimizer is not None,
            scheduler=reads_all and load_lr_scheduler_states and found.scheduler is not None,
        )
        self.finish_saving()
        with phase("load a checkpoint", self._timeout):
            checkpoint = find_checkpoint(Path(load_dir), tag, ranks=self._ranks)
            checkpoint.require_strategy(type(self).__name__)
            self._read_state(checkpoint, found, wanted)
            self._averages.forget(self.unwrap_model(found))
            if model_ema is not None:
                average = self.parameter_source(model_ema)
                self._averages.restore(average, load_average(checkpoint.path, average))
            self._mark_engine_stale()
            if reads_all and not checkpoint.restore_rng(self.get_rank()):
                self.print(f"{checkpoint.path} has no generator states for every rank")
            self.barrier()
        return str(checkpoint.path), checkpoint.client_state()

    def finish_saving(self) -> None:
        """Waits for checkpoints in the background; see `StrategyBase.finish_saving`."""
        with phase("finish saving", self._timeout):
            self._saver.finish()

    def close(self) -> None:
        """Finishes saving, then closes the engine and the processes. Idempotent.

        Raises:
            CheckpointError: A save in the background failed; everything is closed all the same.
        """
        try:
            self._saver.close()
        finally:
            super().close()
