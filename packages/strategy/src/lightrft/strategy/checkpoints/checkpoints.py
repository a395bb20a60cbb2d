"""Checkpoints of a strategy: saving, search and loading, the same for every backend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError

from lightrft.engines.nf4 import quantized_layers
from lightrft.kernels.names import first_line
from lightrft.strategy.backend import AnyModel, PreparedModel, WantedState, inner_module
from lightrft.strategy.checkpoints.files import (
    FileWriter,
    StagedWriter,
    load_scheduler,
    save_scheduler,
)
from lightrft.strategy.checkpoints.folders import (
    SaveRequest,
    Write,
    begin_checkpoint,
    complete_checkpoint,
    find_checkpoint,
    find_checkpoints,
    on_first,
    write_checkpoint,
)
from lightrft.strategy.checkpoints.gathered_model import as_saved, save_gathered_model
from lightrft.strategy.checkpoints.manifest import Checkpoint
from lightrft.strategy.distributed.collectives import Group
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_end import CheckpointError, NonFiniteError
from lightrft.strategy.distributed.process_groups import separate_group
from lightrft.strategy.model_training import ModelTraining
from lightrft.strategy.weight_sync.parameter_source import base_source, gathered_dtype

OTHER_BASE = (
    "give the model and the dtype that the run began with (pretrain, bf16), or a new ckpt_path"
)


class CheckpointSaver:
    """Saver that keeps the order of the calls; a background error surfaces at the next call.

    A background save takes the same steps as any other. A checkpoint is complete when every rank
    has written, flushed and hashed its files; only then are older ones removed.

    Args:
        group: Ranks that save together.
        background_group: Function that makes a separate group of these ranks, called at the first
            background save; None always saves while the caller waits.
    """

    def __init__(self, group: Group, background_group: Callable[[], Group] | None = None) -> None:
        self._group = group
        self._make_background_group = background_group
        self._background: tuple[ThreadPoolExecutor, Group] | None = None
        self._pending: dict[Path, Future[Checkpoint]] = {}

    def save(self, request: SaveRequest, write: Write) -> None:
        """Save one checkpoint. Collective.

        Args:
            request: Folder, name and limits of the checkpoint.
            write: Function that writes this rank's files into a folder with the writer it receives.

        Raises:
            CheckpointError: This save failed, or the last one into this folder did.
        """
        if self._make_background_group is None:
            with _saving_into(request.save_dir):
                write_checkpoint(request, write, group=self._group)
            return
        self._wait(request.save_dir)
        if self._background is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._background = (thread, self._make_background_group())
        thread, group = self._background
        staged, earlier = StagedWriter(), tuple(self._pending.values())
        with _saving_into(request.save_dir):
            draft = begin_checkpoint(request, write, staged, group=self._group)

        def flush() -> None:
            # A checkpoint may rely on the one before it: a run's actor on its critic.
            if any(future.exception() is not None for future in earlier):
                raise CheckpointError("an earlier save failed")
            staged.flush()

        self._pending[request.save_dir] = thread.submit(
            complete_checkpoint, request, draft, flush, group=group
        )

    def finish(self) -> None:
        """Wait until every checkpoint is complete.

        Raises:
            CheckpointError: One of them failed; the message names rank and error.
        """
        failures = []
        for folder in list(self._pending):
            try:
                self._wait(folder)
            except CheckpointError as error:
                failures.append(str(error))
        if failures:
            raise CheckpointError("; ".join(failures))

    def close(self) -> None:
        """Call `finish`, then end the thread."""
        try:
            self.finish()
        finally:
            if self._background is not None:
                self._background[0].shutdown()
                self._background = None

    def _wait(self, folder: Path) -> None:
        """Wait on every rank for the same save, so that all ranks raise its error or none does."""
        if folder in self._pending:
            with _saving_into(folder):
                self._pending.pop(folder).result()


@contextmanager
def _saving_into(folder: Path) -> Iterator[None]:
    """Turn a failure into a CheckpointError that names the folder; NonFiniteError passes."""
    try:
        yield
    except NonFiniteError:
        raise
    except Exception as error:
        raise CheckpointError(f"saving into {folder} failed: {error}") from error


class Checkpoints:
    """A strategy's files: folders of ours around files of the backend, and exported models.

    Args:
        training: Training that prepared the models.
        strategy: Name of the strategy class; only this class loads its checkpoints.
        in_background: Return from a save when the state has been copied to host memory.
    """

    def __init__(self, training: ModelTraining, strategy: str, *, in_background: bool) -> None:
        self.training = training
        self._context = context = training.context
        self._backend = training.backend
        self._strategy = strategy
        # By folder: checkpoints that `find` has verified, so that the next load need not repeat it.
        self._verified: dict[Path, Checkpoint] = {}
        self.group = group = context.world_group

        def background_group() -> Group:
            """Return a separate group, so that a save never meets the collectives of training."""
            if context.world_size == 1:
                return group
            return separate_group(None, timeout=context.timeout)

        self.saver = CheckpointSaver(group, background_group if in_background else None)

    def save(
        self, request: SaveRequest, found: PreparedModel, model_ema: AnyModel | None = None
    ) -> None:
        """Save a checkpoint; see `StrategyBase.save_ckpt`."""
        request = replace(
            request,
            strategy=self._strategy,
            details={**self._backend.checkpoint_details, **self._left_out(found)},
        )

        def write(folder: Path, files: FileWriter) -> None:
            self._backend.write_state(folder, found, files)
            if found.scheduler is not None and self._context.rank == 0:
                save_scheduler(folder, found.scheduler, files)
            if model_ema is not None:
                average = self._backend.parameter_source(model_ema)
                self.training.averages.save(folder, average, files, rank=self._context.rank)

        with phase("save a checkpoint", self._context.timeout):
            self.saver.save(request, write)

    def find(
        self, folders: Sequence[Path], accepts: Callable[[Mapping[str, object]], None] | None = None
    ) -> str | None:
        """Return the newest tag with a whole checkpoint in every folder. Collective.

        Every file is verified; the next load of this tag does not verify it again.

        Args:
            folders: Folders of checkpoints of models that belong together.
            accepts: Function that raises if a client state of the first folder is not usable.

        Returns:
            Tag; None if no folder shows a trace of a checkpoint.

        Raises:
            CheckpointError: None is whole; the message says what is wrong with each.
        """
        self.finish()
        with phase("find a checkpoint", self._context.timeout):
            try:
                checkpoints = find_checkpoints(folders, group=self.group, accepts=accepts)
            except FileNotFoundError:
                return None
        self._verified = dict(zip(folders, checkpoints, strict=True))
        return checkpoints[0].manifest.tag

    def load(
        self,
        folder: Path,
        tag: str | None,
        found: PreparedModel,
        wanted: WantedState = WantedState(),  # noqa: B008 - frozen
        model_ema: AnyModel | None = None,
    ) -> tuple[str, dict[str, object]]:
        """Load a checkpoint; see `StrategyBase.load_ckpt`."""
        self.finish()
        with phase("load a checkpoint", self._context.timeout):
            checkpoint = self._verified.pop(folder, None)
            if checkpoint is None or tag != checkpoint.manifest.tag:
                checkpoint = find_checkpoint(folder, tag, group=self.group)
            checkpoint.require_strategy(self._strategy)
            checkpoint.require_details(self._left_out(found), OTHER_BASE)
            try:
                state = self._read(checkpoint, found, wanted, model_ema)
            # Files with the right hash but other content: none of their code has run.
            except (SafetensorError, UnpicklingError, ValueError, TypeError, LookupError) as error:
                raise CheckpointError(
                    f"{checkpoint.path} cannot be read: {type(error).__name__}: {first_line(error)}"
                ) from error
            self._context.barrier()
        self.training.on_change(True)
        return str(checkpoint.path), state

    def _read(
        self,
        checkpoint: Checkpoint,
        found: PreparedModel,
        wanted: WantedState,
        model_ema: AnyModel | None,
    ) -> dict[str, object]:
        """Read everything into its place; return the client state."""
        self._backend.read_state(checkpoint, found, wanted)
        if wanted.scheduler and found.scheduler is not None:
            load_scheduler(checkpoint.path, found.scheduler)
        self.training.averages.forget(inner_module(found))
        if model_ema is not None:
            average = self._backend.parameter_source(model_ema)
            self.training.averages.load(checkpoint.path, average)
        if wanted.rng and not checkpoint.restore_rng(self._context.rank):
            self._context.print(f"{checkpoint.path} has no generator states for every rank")
        return checkpoint.client_state()

    def _left_out(self, model: PreparedModel) -> dict[str, str]:
        """Return a hash of the frozen weights that checkpoints leave out; collective."""
        module = inner_module(model)
        if not quantized_layers(module):
            return {}
        # Imported here: other runs need no hashes.
        from lightrft.strategy.weight_sync.verification import weights_hash

        source = base_source(module, self._backend.parameter_source(model))
        entries = tuple(entry for entry in source.entries if entry.frozen)
        return {"frozen weights": weights_hash(replace(source, entries=entries))}

    def finish(self) -> None:
        """Wait for saves; see `StrategyBase.finish_saving`."""
        with phase("finish saving", self._context.timeout):
            self.saver.finish()

    def export(self, model: AnyModel, tokenizer: object | None, output_dir: Path) -> None:
        """Gather one parameter at a time and write on rank 0, in the compute dtype."""
        module, dtype = inner_module(model), self._context.compute_dtype
        with phase("save a model", self._context.timeout):
            kept = gathered_dtype(module, dtype)
            values = self._backend.full_values(module)
            keeps = self._context.rank == 0
            state = {name: as_saved(value, kept) for name, value in values if keeps}
            with _saving_into(output_dir):
                on_first(
                    lambda: save_gathered_model(module, state, tokenizer, output_dir, dtype=dtype),
                    self.group,
                )
