"""Failures of one rank while the others wait in collectives of somebody else.

An engine's collectives know nothing of an exception on another rank: the healthy ranks would wait
until the engine's process group times out, half an hour. The process group's store needs no
collective. So a failing rank leaves its error there, and a thread of every other rank looks
for it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch.distributed as dist

from lightrft.strategy.distributed.collectives import Alone, Group, group_size, run_together
from lightrft.strategy.distributed.process_end import PeerFailedError, end_process

T = TypeVar("T")
PEER_FAILED_EXIT_CODE = 1
# Time for others to leave the action by themselves; then all of them raise.
GRACE_SECONDS = 10.0
# A little later, so that the failing rank has left before the ranks waiting for it are ended.
MARGIN_SECONDS = 3.0
_POLL_SECONDS = 0.25
# By group, since ranks may call the actions of two groups in different orders.
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def run_without_collective(action: Callable[[], T], group: Group, *, what: str) -> list[T]:
    """Run an action, as `run_together` does, in which ranks wait in collectives of somebody else.

    Every rank that leaves the action within `GRACE_SECONDS` after the first failure raises. One
    that is still inside ends with exit code 1, and says which rank failed and why.

    Args:
        action: Function whose results are plain Python objects.
        group: Ranks, all of which must call this; a part of all ranks is left to `run_together`.
        what: Failure in words, for messages.

    Raises:
        PeerFailedError: Another rank failed; the message names it. A rank that fails raises
            its original error.
    """
    if isinstance(group, Alone) or not 1 < group_size(group) == dist.get_world_size():
        return run_together(action, group, what=what)
    name = "" if group is None else group.group_name
    board = _Board(f"lightrft/apart/{name}/{next(_calls[name])}", what)
    prefix = f"rank {dist.get_rank()}: "
    result, problem = None, None
    try:
        try:
            result = action()
            board.leave()
        except Exception as error:
            problem = error
            board.report(f"{prefix}{type(error).__name__}: {error}")
            if not board.wait_for_all(GRACE_SECONDS):
                # The others are stuck inside, so an exchange of outcomes would be stuck, too.
                raise
        return cast("list[T]", run_together(lambda: _value(result, problem), group, what=what))
    except Exception as error:
        cause = board.failure()
        if cause is None or cause.startswith(prefix):
            raise
        # A rank that was left alone in a collective has no better cause.
        failure = PeerFailedError(f"{what} on {cause}")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error
    finally:
        board.close()


def _value(result: T, problem: Exception | None) -> T:
    if problem is not None:
        raise problem
    return result


class _Board:
    """Messages of the ranks to each other through the store, during one action.

    A thread ends this process if another rank fails and this one does not return.

    Args:
        prefix: Beginning of its keys; the same on all ranks.
        what: Failure in words, for messages.
    """

    def __init__(self, prefix: str, what: str) -> None:
        # A separate connection: another thread may block on the original.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined, unused-ignore]
        self._lock = threading.Lock()
        self._prefix = prefix
        self._failure: str | None = None
        self._what = what
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            text = self.failure()
            if text is not None and not self._done.wait(GRACE_SECONDS + MARGIN_SECONDS):
                line = f"ended because another rank failed: {self._what} on {text}"
                print(line, file=sys.stderr, flush=True)  # noqa: T201
                end_process(line, PEER_FAILED_EXIT_CODE)

    def close(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join()

    def report(self, text: str) -> None:
        """Leave an error, unless another rank was first, and count as out of the action."""
        with self._lock:
            self._store.compare_set(f"{self._prefix}/failure", "", text)
        self.leave()

    def failure(self) -> str | None:
        """Return the first error that a rank left; keep it, as the store may end with its rank."""
        key = f"{self._prefix}/failure"
        with self._lock:
            try:
                if self._failure is None and self._store.check([key]):
                    self._failure = self._store.get(key).decode()
            except RuntimeError as error:
                self._failure = (
                    f"rank 0, which held the process group's store: it is gone ({error})"
                )
            return self._failure

    def leave(self) -> None:
        """Report that this rank is out of the action."""
        with self._lock:
            self._store.add(f"{self._prefix}/out", 1)

    def wait_for_all(self, seconds: float) -> bool:
        """Return whether every rank leaves the action within this time."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            with self._lock:
                if self._store.add(f"{self._prefix}/out", 0) == dist.get_world_size():
                    return True
            time.sleep(_POLL_SECONDS)
        return False
