"""How benchmarks here measure: providers take turns, medians count, floors are measured too."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_ROUNDS = 7
PILOT_SECONDS = 0.15
FLUSH_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the rounds of one provider."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        ordered = sorted(self.seconds)
        last = len(ordered) - 1
        return ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def interleave(
    providers: dict[str, Callable[[], object]], device: torch.device, budget_seconds: float
) -> dict[str, Timing]:
    """Times the providers in turns, so that a drifting clock meets all of them alike.

    Args:
        providers: What to run, by name.
        device: Where it runs; on CUDA, events are timed after the cache was flushed.
        budget_seconds: For all rounds together; at least MIN_ROUNDS rounds are run.
    """
    round_seconds = 0.0
    for run in providers.values():
        run()  # compiles, allocates
        round_seconds += max(_time(run, device), PILOT_SECONDS / 100)
    num_rounds = max(MIN_ROUNDS, min(101, int(budget_seconds / round_seconds)))
    rounds: dict[str, list[float]] = {name: [] for name in providers}
    for _ in range(num_rounds):
        for name, run in providers.items():
            rounds[name].append(_time(run, device))
    return {name: Timing(tuple(seconds)) for name, seconds in rounds.items()}


def _time(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Memory that one run needs above what is there before it.

    Counts what torch allocates: by its allocator on CUDA, by its profiler on the CPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    return largest


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
