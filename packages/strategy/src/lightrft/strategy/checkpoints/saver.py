"""Checkpoints of one process, written while it waits or in the background."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightrft.strategy.checkpoints.errors import CheckpointError
from lightrft.strategy.checkpoints.file_writers import FileWriter, StagedWriter
from lightrft.strategy.checkpoints.folders import (
    OpenCheckpoint,
    RankGroup,
    SaveRequest,
    begin_checkpoint,
    complete_checkpoint,
    write_checkpoint,
)

Write = Callable[[Path, FileWriter], None]


class CheckpointSaver:
    """Saves in the order of the calls; an error in the background surfaces at the next call.

    In the background a checkpoint goes through the same steps as otherwise: it is complete when
    every rank has written, flushed and hashed its files, and only then are older ones removed.

    Args:
        ranks: The ranks that save together.
        background_ranks: The same ranks with a `gather` of their own, made at the first save in
            the background; None always saves while the caller waits.
    """

    def __init__(
        self, ranks: RankGroup, background_ranks: Callable[[], RankGroup] | None = None
    ) -> None:
        self._ranks = ranks
        self._make_background_ranks = background_ranks
        self._background: tuple[ThreadPoolExecutor, RankGroup] | None = None
        self._pending: dict[Path, Future[None]] = {}

    def save(self, request: SaveRequest, write: Write) -> None:
        """Save one checkpoint. Collective.

        Args:
            request: Where and under which name.
            write: Writes this rank's files of a folder by the writer it is given.

        Raises:
            CheckpointError: This save failed, or the last one into this folder did.
        """
        if self._make_background_ranks is None:
            files = FileWriter()
            write_checkpoint(request, lambda folder: write(folder, files), ranks=self._ranks)
            return
        self._wait(request.save_dir)
        if self._background is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._background = (thread, self._make_background_ranks())
        thread, ranks = self._background
        staged = StagedWriter()
        opened = begin_checkpoint(
            request, lambda folder: write(folder, staged), ranks=self._ranks, files=staged
        )
        earlier = tuple(self._pending.values())
        self._pending[request.save_dir] = thread.submit(_complete, opened, staged, ranks, earlier)

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
        """`finish`, then end the thread."""
        try:
            self.finish()
        finally:
            if self._background is not None:
                self._background[0].shutdown()
                self._background = None

    def _wait(self, folder: Path) -> None:
        """Every rank waits for the same save and gets the same error, so all raise or none."""
        future = self._pending.pop(folder, None)
        if future is None:
            return
        try:
            future.result()
        except Exception as error:
            raise CheckpointError(f"saving into {folder} failed: {error}") from error


def _complete(
    opened: OpenCheckpoint,
    staged: StagedWriter,
    ranks: RankGroup,
    earlier: tuple[Future[None], ...],
) -> None:
    """In the thread, which has ended all earlier saves."""

    def flush() -> None:
        # A checkpoint may rely on the one before it: a run's actor on its critic.
        if any(future.exception() is not None for future in earlier):
            raise CheckpointError("an earlier save failed")
        staged.flush()

    complete_checkpoint(opened, ranks=ranks, flush=flush)
