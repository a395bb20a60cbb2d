"""Order of work on a device: buckets are filled beside their consumer, without host waits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Timeline(Protocol):
    """Keeps the filling of buckets and their use in order."""

    def filling(self) -> AbstractContextManager[object]:
        """Work queued inside fills buckets."""

    def begin(self) -> None:
        """What the consumer has queued so far comes before any filling queued from now on."""

    def hand_over(self) -> None:
        """What has been queued to fill comes before what the consumer queues from now on."""


class HostTimeline:
    """Host memory: everything happens in program order."""

    def filling(self) -> AbstractContextManager[object]:
        """Nothing to enter."""
        return nullcontext()

    def begin(self) -> None:
        """Nothing to wait for."""

    def hand_over(self) -> None:
        """Nothing to wait for."""


class CudaTimeline:
    """A stream of its own for filling; events order it against the consumer's stream.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def filling(self) -> AbstractContextManager[object]:
        """The filling stream is the current one inside."""
        return torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """Makes the filling stream wait for an event on the consumer's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def hand_over(self) -> None:
        """Makes the consumer's stream wait for an event on the filling stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def make_timeline(device: torch.device) -> Timeline:
    """The timeline of a device."""
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
