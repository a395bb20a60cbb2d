"""Stopping a run from outside: a signal asks, the ranks agree, a checkpoint is written."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightrft.strategy.distributed.error_report import has_failed_peer

# Schedulers send one of them some time before they end a job.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers that a signal asked this process to stop; nothing is interrupted."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes `STOP_SIGNALS` while the body runs; call it from the main thread."""
        before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self.signal_name is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and has_failed_peer():
            # This is torch's agent, which ends all ranks after one has failed.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_name = signal.Signals(number).name


class RunStoppedError(Exception):
    """A run was asked to stop and has written a checkpoint.

    Args:
        num_steps: Completed steps.
        output_dir: Folder of the run.
    """

    def __init__(self, num_steps: int, output_dir: str) -> None:
        self.num_steps = num_steps
        super().__init__(
            f"stopped as asked after step {num_steps}, with a complete checkpoint in {output_dir}: "
            "the same command continues"
        )
