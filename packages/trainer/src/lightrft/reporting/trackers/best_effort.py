"""Parts that the adapters of trackers share."""

import io
import logging
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from lightrft.config.files import read_text

logger = logging.getLogger(__name__)


class TrackerError(RuntimeError):
    """A requested tracker that cannot be used; the message names the option."""


class BestEffortLogger:
    """A tracker whose first failure is reported once and ends it, not the run.

    Args:
        name: Option that asked for it.
        send: Callback that takes step and metrics.
        end: Callback that writes what is pending.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[int, Mapping[str, float]], object],
        end: Callable[[], object],
    ) -> None:
        self._name, self._send, self._end = name, send, end
        self._has_failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics on while the tracker works."""
        self._try(lambda: self._send(step, metrics))

    def close(self) -> None:
        """Close the tracker."""
        self._try(self._end)

    def _try(self, action: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:
            self._has_failed = True
            logger.warning(
                "%s failed and gets nothing more, the run goes on: %s", self._name, error
            )
            logger.debug("why %s failed", self._name, exc_info=error)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that every tracker can draw."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def kept_id(folder: Path, file: str) -> str:
    """Return an id of the run, the same for all its parts, kept in a file of its folder."""
    path = folder / file
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return read_text(path).strip()


@contextmanager
def told_to_log(name: str) -> Iterator[None]:
    """Send what a tracker's library prints to the run's log: the console is the run's."""
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            yield
    finally:
        for line in filter(None, map(str.strip, said.getvalue().splitlines())):
            logger.debug("%s: %s", name, line)


def quiet_logger(
    name: str, log: Callable[..., object], finish: Callable[[], object]
) -> BestEffortLogger:
    """Return the logger of `--loggers NAME` for a library that prints at its end.

    Args:
        name: Name of the library.
        log: Callback that takes metrics, and `step` by keyword.
        finish: Callback that ends its run.
    """

    def end() -> None:
        with told_to_log(name):
            finish()

    return BestEffortLogger(
        f"--loggers {name}", lambda step, metrics: log(finite(metrics), step=step), end
    )
