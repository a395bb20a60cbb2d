"""Phases of a run: their deadlines, durations and memory, and notes on errors from them.

A hang ends the process and says where every rank was.
"""

from __future__ import annotations

import ast
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrft.strategy.distributed.context import measure_memory
from lightrft.strategy.distributed.process_end import LastPhase, end_process, record_phase

logger = logging.getLogger(__name__)
HANG_EXIT_CODE = 7
_LAST_RESORT_SECONDS = 10.0
_ANSWER_SECONDS = 1.0
_NOTE = "in phase "
# Phases that follow each other faster share a record in the store.
_RECORD_SECONDS = 1.0
# For all threads: rollouts may run beside training.
_stack: list[_Deadline] = []
_stack_lock = threading.RLock()
_changed = threading.Condition(_stack_lock)


@dataclass(frozen=True, slots=True)
class _Deadline:
    """One running phase; its begin is of the monotonic clock."""

    phase_name: str
    seconds: float
    begin: float = field(default_factory=time.monotonic)

    def remaining(self) -> float:
        """Return the seconds until it expires."""
        return self.begin + self.seconds - time.monotonic()


class Watcher(threading.Thread):
    """A thread that ends the process when a phase takes too long.

    One thread serves all phases: every micro-batch is one.
    """

    running: Watcher | None = None

    @classmethod
    def wake(cls) -> None:
        """Wake the thread for a new phase; a forked process starts another one."""
        if cls.running is None or not cls.running.is_alive():
            cls.running = cls(name="deadlines", daemon=True)
            cls.running.start()
        _changed.notify_all()

    def run(self) -> None:
        """Wait for the nearest deadline and end the process at it."""
        with _stack_lock:
            while True:
                nearest = min(_stack, key=_Deadline.remaining, default=None)
                if nearest is not None and nearest.remaining() <= 0:
                    break
                _changed.wait(None if nearest is None else nearest.remaining())
        _expire(nearest.phase_name, nearest.seconds)


@dataclass
class _Record:
    """The phase of this process that the other ranks see in the store.

    Args:
        outermost: Phase around it when it was written; "" for none.
        written: Time of the write, by the monotonic clock.
        store: Store that holds it; another process group has another one.
    """

    outermost: str = ""
    written: float = -math.inf
    store: dist.Store | None = None

    def write(self, name: str) -> None:
        """Write to the store if the outermost phase changed, or a second later.

        All ranks write to the process of rank 0, and micro-batches are phases.
        """
        store, now = shared_store(), time.monotonic()
        outermost = _stack[0].phase_name if _stack else self.outermost
        is_known = store is self.store and outermost == self.outermost
        if store is None or (is_known and now - self.written < _RECORD_SECONDS):
            return
        self.outermost, self.written, self.store = outermost, now, store
        rank, _ = _rank()
        store.set(f"lightrft/phase/{rank}", f"{name} (since {time.strftime('%H:%M:%S')})")


_last_record = _Record()


def _rank() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def shared_store() -> dist.Store | None:
    """Return the store of the default process group: reading it needs no collective."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def _record(name: str, seconds: float = math.inf) -> None:
    record_phase(LastPhase(name, time.time() + seconds))
    _last_record.write(name)


def peer_phases() -> list[str]:
    """Return the last recorded phase of each rank; "no phase recorded" for a rank without one."""
    store = shared_store()
    if store is None:
        return []
    _, world_size = _rank()
    phases = []
    for rank in range(world_size):
        key = f"lightrft/phase/{rank}"
        is_known = store.check([key])
        phases.append(store.get(key).decode() if is_known else "no phase recorded")
    return phases


def silent_ranks() -> list[int]:
    """Return the ranks that reach no deadline together with this one, after a short wait.

    Ranks that wait for each other wait equally long; one that is stopped or stuck elsewhere does
    not answer.
    """
    store = shared_store()
    if store is None:
        return []
    rank, world_size = _rank()
    store.set(f"lightrft/expired/{rank}", "")
    peers = set(range(world_size)) - {rank}
    limit = time.monotonic() + _ANSWER_SECONDS
    while peers and time.monotonic() < limit:
        peers -= {peer for peer in peers if store.check([f"lightrft/expired/{peer}"])}
        time.sleep(0.05)
    return sorted(peers)


def current_phase() -> tuple[str, float] | None:
    """Return the innermost running phase of this process and its seconds so far, or None."""
    running = _stack[-1:]
    if not running:
        return None
    return running[0].phase_name, time.monotonic() - running[0].begin


def _expire(name: str, seconds: float) -> None:
    """Print where every rank is, then end the process with code 7."""
    rank, _ = _rank()
    # The store's server may be the process that hangs.
    faulthandler.dump_traceback_later(_LAST_RESORT_SECONDS, exit=True)
    lines = [f"deadline: rank {rank} spent more than {seconds:g} s in phase {name!r}"]
    # At once: the store may not answer.
    print(lines[0], file=sys.stderr, flush=True)  # noqa: T201
    try:
        lines += [f"  rank {peer}: {text}" for peer, text in enumerate(peer_phases())]
        if silent := silent_ranks():
            lines.append(f"  rank(s) {silent} ran into no deadline: stopped, or stuck elsewhere")
    except RuntimeError as err:
        lines.append(f"  phases of the other ranks are unknown: {err}")
    print("\n".join(lines[1:]), file=sys.stderr, flush=True)  # noqa: T201
    end_process("\n".join(lines), HANG_EXIT_CODE)


def _arm_last_resort() -> None:
    """Arm a C timer: it fires without the GIL, a little after the innermost phase's watchdog."""
    faulthandler.cancel_dump_traceback_later()
    if _stack:
        nearest = min(deadline.remaining() for deadline in _stack)
        faulthandler.dump_traceback_later(
            max(0.001, nearest) + _LAST_RESORT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr
        )


@contextmanager
def phase(name: str, seconds: float | timedelta) -> Iterator[None]:
    """End the process with code 7 if the body takes longer.

    On expiry a watchdog thread prints this rank, the phase and the last phase of every rank (from
    the process group's store), then all stacks. If the interpreter itself is stuck, a timer in C
    prints the stacks and exits (code 1) 10 s later. Phases may nest, and run in several threads;
    the one that began last is recorded. The store receives it when the outermost one changes or
    after a second, the launcher's file always.

    Args:
        name: Name of the phase, e.g. "generate".
        seconds: Deadline.
    """
    limit = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    if limit <= 0:
        raise ValueError(f"phase {name!r} needs a positive deadline, got {limit}")
    with _stack_lock:
        deadline = _Deadline(name, limit)
        _stack.append(deadline)
        _record(name, limit)
        Watcher.wake()
        _arm_last_resort()
    try:
        yield
    except BaseException as error:
        note_phase(error, name)
        raise
    finally:
        logger.debug("phase %r took %.3f s", name, time.monotonic() - deadline.begin)
        with _stack_lock:
            _stack.remove(deadline)
            _arm_last_resort()
            if _stack:
                _record(_stack[-1].phase_name, _stack[-1].remaining())
            else:
                _record(f"between phases, after {name}")


def note_phase(error: BaseException, name: str) -> None:
    """Attach to an exception the innermost phase that it came from, and this rank."""
    if phase_of(error) is None:
        rank, world_size = _rank()
        error.add_note(f"{_NOTE}{name!r}")
        error.add_note(f"on rank {rank} of {world_size}")


def phase_of(error: BaseException) -> str | None:
    """Return the phase of an exception, or of the first one behind it that has a phase."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:  # an error may be its cause itself
        notes: list[str] = link.__dict__.get("__notes__", [])
        for note in notes:
            if note.startswith(_NOTE):
                name: str = ast.literal_eval(note.removeprefix(_NOTE))
                return name
        seen.append(link)
        # An error while a failed run is closed hides the first error behind it.
        link = link.__cause__ or link.__context__
    return None


def peak_bytes() -> int:
    """Return torch's peak allocation since a stage began; on a CPU the process' memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return measure_memory().allocated_bytes


# Function of a step (0 where it is not known), its stage, and when that began and ended on this
# rank, in seconds since 1970.
SpanSink = Callable[[int, str, float, float], None]
_span_sinks: list[SpanSink] = []


@contextmanager
def span_sink(sink: SpanSink) -> Iterator[None]:
    """Call a function for every stage that ends in the body."""
    _span_sinks.append(sink)
    try:
        yield
    finally:
        _span_sinks.remove(sink)


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Durations and memory by stage, on this rank.

    Args:
        step: Number of the step, 0 where it is not known.
        seconds: Duration of each stage, summed over its repetitions.
        memory_bytes: On a GPU torch's peak allocation during the stage; on a CPU the memory of
            the process at its end.
    """

    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the body."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start, began = time.perf_counter(), time.time()
        try:
            yield
        except BaseException as error:
            note_phase(error, name)
            raise
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        for sink in _span_sinks:
            sink(self.step, name, began, time.time())
        self.memory_bytes[name] = max(self.memory_bytes.get(name, 0), peak_bytes())
