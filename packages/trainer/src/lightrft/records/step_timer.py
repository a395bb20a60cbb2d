"""Duration and memory of the stages of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lightrft.strategy.distributed.context import measure_memory
from lightrft.strategy.distributed.deadlines import note_phase


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Durations and memory by stage, on this rank.

    Args:
        seconds: Duration of each stage, summed over its repetitions.
        memory_bytes: On a GPU the most that torch allocated during the stage; on a CPU what the
            process holds at its end.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures what runs inside."""
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            note_phase(error, name)
            raise
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if has_gpu else measure_memory().allocated_bytes
        self.memory_bytes[name] = max(self.memory_bytes.get(name, 0), peak)
