"""save_ckpt and load_ckpt: the same for every backend but for the state itself."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError

from lightrft.strategy.backend import Backend, WantedState
from lightrft.strategy.checkpoints.client_state import load_scheduler, save_scheduler
from lightrft.strategy.checkpoints.errors import CheckpointError
from lightrft.strategy.checkpoints.file_writers import FileWriter
from lightrft.strategy.checkpoints.folders import (
    RankGroup,
    SaveRequest,
    find_checkpoint,
    find_checkpoints,
)
from lightrft.strategy.checkpoints.gathered_model import as_saved, save_gathered_model
from lightrft.strategy.checkpoints.manifest import Checkpoint
from lightrft.strategy.checkpoints.moving_averages import MovingAverages
from lightrft.strategy.checkpoints.saver import CheckpointSaver
from lightrft.strategy.distributed.collectives import gather_objects
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_groups import separate_group
from lightrft.strategy.prepared import AnyModel, PreparedModel, inner_module
from lightrft.strategy.weight_sync.parameter_source import gathered_dtype


class Checkpoints:
    """A strategy's files: folders of ours around files of the backend, and exported models.

    Args:
        context: Started.
        backend: Writes and reads states.
        strategy: Name of the strategy class; only it loads what it has saved.
        in_background: Saves return when the state has been copied to host memory.
    """

    def __init__(
        self, context: DistributedContext, backend: Backend, strategy: str, *, in_background: bool
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._backend = backend
        self.averages = MovingAverages()
        # By folder: what `find` has verified and the next load of it need not verify again.
        self._verified: dict[Path, Checkpoint] = {}
        self.group = RankGroup(context.rank, context.world_size, context.gather_objects)
        self.saver = CheckpointSaver(
            self.group, self._make_background_group if in_background else None
        )

    def _make_background_group(self) -> RankGroup:
        """A group of its own, so that a save never meets the collectives of training."""
        group = self._context.world_group
        if self._context.world_size > 1:
            group = separate_group(None, timeout=self._context.timeout)
        return RankGroup(
            self._context.rank, self._context.world_size, lambda item: gather_objects(item, group)
        )

    def save(self, request: SaveRequest, found: PreparedModel, model_ema: AnyModel | None) -> None:
        """See `StrategyBase.save_ckpt`."""

        def write(folder: Path, files: FileWriter) -> None:
            self._backend.write_state(folder, found, files)
            if found.scheduler is not None and self._context.rank == 0:
                save_scheduler(folder, found.scheduler, files)
            if model_ema is not None:
                average = self._backend.parameter_source(model_ema)
                self.averages.save(folder, average, files, rank=self._context.rank)

        with phase("save a checkpoint", self._context.timeout):
            self.saver.save(request, write)

    def find(
        self, folders: Sequence[Path], accepts: Callable[[Mapping[str, object]], None] | None = None
    ) -> str | None:
        """See `StrategyBase.find_ckpt`."""
        self.finish()
        with phase("find a checkpoint", self._context.timeout):
            try:
                found = find_checkpoints(folders, ranks=self.group, accepts=accepts)
            except FileNotFoundError:
                return None
        self._verified = dict(zip(folders, found, strict=True))
        return found[0].manifest.tag

    def load(
        self,
        folder: Path,
        tag: str | None,
        found: PreparedModel,
        wanted: WantedState,
        model_ema: AnyModel | None,
    ) -> tuple[str, dict[str, object]]:
        """See `StrategyBase.load_ckpt`."""
        self.finish()
        with phase("load a checkpoint", self._context.timeout):
            checkpoint = self._verified.pop(folder, None)
            if checkpoint is None or tag != checkpoint.manifest.tag:
                checkpoint = find_checkpoint(folder, tag, ranks=self.group)
            checkpoint.require_strategy(self._strategy)
            try:
                state = self._read(checkpoint, found, wanted, model_ema)
            # Files of the right hash that hold something else: no code of theirs has run.
            except (SafetensorError, UnpicklingError, ValueError, TypeError, LookupError) as error:
                lines = str(error).strip().splitlines() or [""]
                raise CheckpointError(
                    f"{checkpoint.path} cannot be read: {type(error).__name__}: {lines[0]}"
                ) from error
            self._context.barrier()
        return str(checkpoint.path), state

    def _read(
        self,
        checkpoint: Checkpoint,
        found: PreparedModel,
        wanted: WantedState,
        model_ema: AnyModel | None,
    ) -> dict[str, object]:
        """Reads everything into its place; returns the client state."""
        self._backend.read_state(checkpoint, found, wanted)
        if wanted.scheduler and found.scheduler is not None:
            load_scheduler(checkpoint.path, found.scheduler)
        self.averages.forget(inner_module(found))
        if model_ema is not None:
            average = self._backend.parameter_source(model_ema)
            self.averages.load(checkpoint.path, average)
        if wanted.rng and not checkpoint.restore_rng(self._context.rank):
            self._context.print(f"{checkpoint.path} has no generator states for every rank")
        return checkpoint.client_state()

    def finish(self) -> None:
        """See `StrategyBase.finish_saving`."""
        with phase("finish saving", self._context.timeout):
            self.saver.finish()

    def export(self, model: AnyModel, tokenizer: object | None, output_dir: Path) -> None:
        """Gathers one parameter at a time and writes on rank 0, in the compute dtype."""
        module, dtype = inner_module(model), self._context.compute_dtype
        with phase("save a model", self._context.timeout):
            kept = gathered_dtype(module, dtype)
            values = self._backend.full_values(module)
            keeps = self._context.rank == 0
            state = {name: as_saved(value, kept) for name, value in values if keeps}
            self.group.on_first(
                lambda: save_gathered_model(module, state, tokenizer, output_dir, dtype=dtype)
            )
