"""The connection between the ranks that train and those that only generate.

The first rank that trains sends commands. All ranks that generate run them in one order, and
results return to every rank that trains. Nothing here depends on a process group of either side, so
each side's collectives stay separate.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.strategy.distributed.collectives import as_tensor, exchanged_parts
from lightrft.strategy.distributed.deadlines import HANG_EXIT_CODE, current_phase
from lightrft.strategy.distributed.process_end import PeerFailedError, end_process
from lightrft.strategy.distributed.process_groups import Side

# For one collective: the lifeline and the phases decide how long it may take.
FOREVER: Final = timedelta(days=30)
GroupBackend = Literal["nccl", "gloo"]
_LONGEST_BEAT: Final = 10.0
# A wait ends late by this share of it, within bounds: most waits are short.
_LATE_SHARE: Final = 1 / 16
_PAUSES: Final = (2e-5, 2e-3)
END: Final = "end"


class Lifeline:
    """A signal to the other side that this process lives, and a check of the others' signals.

    A process that died closes its connections. One that is stopped, or whose machine is gone, does
    not.

    Args:
        side: Side of this process.
        store: Store that all ranks share.
        limit: Seconds of silence after which a rank counts as lost.
    """

    def __init__(self, side: Side, store: dist.Store, limit: float) -> None:
        self._side, self._limit = side, limit
        # The original may be in use.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
        self._period = min(_LONGEST_BEAT, limit / 4)
        generating = range(side.num_training, side.num_training + side.num_generating)
        others = range(side.num_training) if side.generates else generating
        self._heard = dict.fromkeys(others, (b"", time.monotonic()))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lifeline", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        number = 0
        # A store that is gone or stopped reports nobody: then all are silent.
        with suppress(RuntimeError):
            while not self._done.wait(self._period if number else 0):
                number += 1
                self._store.set(f"beat/{self._side.launch_rank}", str(number))
                for rank, (seen, _) in self._heard.items():
                    key = f"beat/{rank}"
                    beat = self._store.get(key) if self._store.check([key]) else b""
                    if beat != seen:
                        self._heard[rank] = beat, time.monotonic()

    def silence(self) -> str | None:
        """Return which ranks of the other side are silent; None if all live."""
        oldest = time.monotonic() - self._limit
        silent = [rank for rank, (_, since) in self._heard.items() if since < oldest]
        if not silent:
            return None
        names = ", ".join(map(self._side.describe, silent))
        return f"no sign of life for {self._limit:g} s: {names}"

    def close(self) -> None:
        """Stop the signal."""
        self._done.set()
        self._thread.join(self._period)


class Bridge:
    """Commands, results and rows between the two sides; ranks are those of the launch.

    Args:
        side: Side of this process.
        store: Store that all ranks share.
        timeout: Silence of a rank after which it counts as lost.

    Attributes:
        peer_wants_stop: A rank that generates was asked to stop.
        everyone: All ranks of the launch, for values in memory of the host.
    """

    def __init__(self, side: Side, store: dist.Store, timeout: timedelta) -> None:
        self.side, self.peer_wants_stop, self._num_received = side, False, 0
        self.rank = side.launch_rank
        self.world_size = side.num_training + side.num_generating
        self._problem: Exception | None = None
        self._has_answered = True  # the command in progress
        self.timeout, self._store = timeout, store
        self._on_gpus: list[dist.ProcessGroupNCCL] = []
        self.everyone = self.open_group("everyone", self.rank, self.world_size)
        self._link: dist.ProcessGroup | None = None
        if side.generates or side.rank == 0:
            rank = side.rank + 1 if side.generates else 0
            self._link = self.open_group("link", rank, side.num_generating + 1)
        self._lifeline = Lifeline(side, store, timeout.total_seconds())

    def open_group(
        self, name: str, rank: int, size: int, backend: GroupBackend = "gloo"
    ) -> dist.ProcessGroup:
        """Open a group outside of every world; torch's stubs have its methods in the base class."""
        prefixed = dist.PrefixStore(name, self._store)
        if backend == "gloo":
            group = dist.ProcessGroupGloo(prefixed, rank, size, self.timeout)
            return cast("dist.ProcessGroup", group)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        self._on_gpus.append(dist.ProcessGroupNCCL(prefixed, rank, size, options))
        return cast("dist.ProcessGroup", self._on_gpus[-1])

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank of its side."""
        return self.side.rank == 0

    def asked_to_stop(self, own: Callable[[], bool]) -> bool:
        """Return whether this process, by `own`, or a rank that generates was asked to stop."""
        return own() or self.peer_wants_stop

    def count_received(self, num_bytes: int) -> None:
        """Add bytes that came by another way."""
        self._num_received += num_bytes

    def take_received(self) -> int:
        """Return the bytes that this rank has received since the last call."""
        num_received, self._num_received = self._num_received, 0
        return num_received

    # --- commands

    def send(self, name: str, *arguments: object) -> None:
        """Send a command to the ranks that generate; only the first rank that trains sends.

        Args:
            name: Name of the command.
            arguments: Plain objects.
        """
        if self.side.rank:
            return
        data = pickle.dumps((name, arguments))
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(as_tensor(data))

    def receive(self) -> tuple[str, tuple[object, ...]]:
        """Return the next command: its name and arguments."""
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data)
        self._num_received += data.numel()
        name, arguments = pickle.loads(data.numpy().tobytes())
        return name, arguments

    def serve(self, handlers: dict[str, Callable[..., None]]) -> object:
        """Run commands until the end; return the argument of the end.

        An error of a handler is sent with the next result, and raised there.
        """
        while True:
            name, arguments = self.receive()
            if name == END:
                return arguments[0] if arguments else None
            if self._problem is not None and name not in ANSWERED:
                continue
            self._has_answered = name not in ANSWERED
            try:
                handlers[name](*arguments)
            except PeerFailedError:
                raise
            except Exception as error:
                if error is self._problem:  # it has been sent
                    raise
                self._problem = self._problem or error
                if not self._has_answered:
                    self.answer(None)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Let errors of the body leave `serve` at once: the other side waits in a collective."""
        try:
            yield
        except Exception as error:
            self._problem = error
            raise

    def answer(self, result: object) -> None:
        """Send all ranks that train a result of the command in progress.

        Raises:
            Exception: Error of an earlier command; it is sent first.
        """
        self._has_answered, problem = True, self._problem
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        data = pickle.dumps((None if text else result, text))
        training, generating = self.side.num_training, self.side.num_generating
        self.exchange_bytes([data] * training + [b""] * generating)
        if problem is not None:
            raise problem

    def results(self) -> list[object]:
        """Return results of the last command, by rank that generates; collective over both sides.

        Raises:
            PeerFailedError: A rank that generates failed; the message names it.
        """
        received = self.exchange_bytes([b""] * self.world_size)
        answers = [pickle.loads(data) for data in received[self.side.num_training :]]
        for number, (_, text) in enumerate(answers):
            if text is not None:
                name = self.side.describe(self.side.num_training + number)
                raise PeerFailedError(f"{name}: {text}")
        return [result for result, _ in answers]

    def ask(self, name: str, *arguments: object) -> list[object]:
        """Send a command and return its results; every rank that trains calls it."""
        self.send(name, *arguments)
        return self.results()

    # --- rows

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send every rank of the launch its part; return the parts received, by rank."""
        options, everyone = dist.AllToAllOptions(), self.everyone
        options.timeout = FOREVER

        def move(
            incoming: Tensor, outgoing: Tensor, lengths: list[int], sizes: list[int]
        ) -> Tensor:
            self.wait(lambda: everyone.alltoall_base(incoming, outgoing, lengths, sizes, options))
            return incoming

        received = exchanged_parts(parts, move)
        self._num_received += sum(map(len, received)) - len(received[self.rank])
        return received

    def _broadcast(self, values: Tensor) -> None:
        """Broadcast from the first rank that trains to those that generate."""
        link = self._link
        if link is None:
            raise RuntimeError("only the first rank that trains has the link")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, FOREVER
        self.wait(lambda: link.broadcast([values], options))

    def wait(self, begin: Callable[[], dist.Work], *, within_side: bool = False) -> None:
        """Wait for a collective as long as both sides live; else end the process.

        Args:
            begin: Function that begins the collective, or returns one in progress.
            within_side: Whether its ranks are all of this side.

        Raises:
            PeerFailedError: A rank closed its connections.
        """
        try:
            work, begun = begin(), time.monotonic()
            while not work.is_completed():
                silence = self._lifeline.silence()
                if silence is not None:
                    # A collective in progress can be neither abandoned nor destroyed.
                    line = f"deadline: {self._whereabouts()}: {silence}"
                    print(line, file=sys.stderr, flush=True)  # noqa: T201
                    end_process(line, HANG_EXIT_CODE)
                shortest, longest = _PAUSES
                pause = _LATE_SHARE * (time.monotonic() - begun)
                time.sleep(min(longest, max(shortest, pause)))
            work.wait()
        except RuntimeError as error:
            first, size = self.side.num_training, self.world_size
            generate = self.side.generates == within_side
            lost = range(first, size) if generate else range(first)
            names = ", ".join(str(rank) for rank in lost if rank != self.rank)
            raise PeerFailedError(
                f"{self._whereabouts()}, lost the ranks that {'generate' if generate else 'train'} "
                f"({names}): {error}"
            ) from error

    def _whereabouts(self) -> str:
        """Return this rank, its work, and its current phase."""
        phase = current_phase()
        where = "" if phase is None else f", in phase {phase[0]!r}"
        return f"{self.side.describe(self.rank)}{where}"

    def close(self) -> None:
        """End the connection; waiting ranks notice it."""
        self._lifeline.close()
        for group in self._on_gpus:  # a collective that waits for a lost rank would never end
            group.abort()
        self._on_gpus.clear()
        self.everyone = self._link = None  # type: ignore[assignment]


# Commands that have results.
ANSWERED = frozenset({"manifest", "load", "hashes", "call", "draw", "drawn", "evaluate", "save"})
